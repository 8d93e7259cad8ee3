"""The text of `Pipeline.describe`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Sequence

from fastpipe.hardware_queues import VARIABLE, queues_text
from fastpipe.program import Op, Program
from fastpipe.runtime import native
from fastpipe.runtime.arguments import ExecutionArguments
from fastpipe.runtime.common import listed
from fastpipe.runtime.construction import LocalStages
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model import NONE, state_prefix
from fastpipe.runtime.stage import FUSED, IN_ORDER, IN_TURNS, TOGETHER, RngUsage, Stage
from fastpipe.runtime.step import Steps

WITHOUT_EXTENSION = "without the native extension I computes all gradients, and W none"


def describe(
    steps: Steps, local: LocalStages, execution: ExecutionArguments, seed: int | None, num_microbatches: int
) -> str:
    """The schedule, the local stages, their execution, and warnings."""
    with steps.copies.in_place():
        lines = _stages_lines(steps, local, seed, num_microbatches)
    if (queues := steps.programs.queues) is not None:
        lines.append(f"queues      proved for {queues_text(queues)} ({VARIABLE})")
    if where := str(steps.cores):
        lines.append(f"cores       {where}")
    if steps.unfilled is not None:
        lines.append("meta        stages are built on the meta device: to_empty or load them before the first step")
    if steps.control.remark:
        lines.append(f"control     {steps.control.remark}")
    if execution.audit is not None:
        lines.append(f"audit       {steps.audit or 'no: the device may not compute the same bits twice'}")
    if execution.cuda_graph:
        lines.append(f"cuda graph  {steps.ranks.recording_text()}")
    if steps.programs.has_pairs(num_microbatches) or steps.ranks.pair_counts():
        program = steps.programs.program(num_microbatches, forward_only=False)
        lines.append(f"pairs       {pairs_text(steps, program, local)}")
    return "\n".join(lines)


def _stages_lines(steps: Steps, local: LocalStages, seed: int | None, num_microbatches: int) -> list[str]:
    schedule, stages = steps.programs.schedule(num_microbatches), local.stages
    program = steps.programs.program(num_microbatches, forward_only=False)
    options = ", ".join(f"{name}={value}" for name, value in schedule.options.items())
    name = f"{schedule.name} ({options})" if options else schedule.name
    held = "; ".join(f"rank {rank}: {', '.join(map(str, stages))}" for rank, stages in local.by_rank.items())
    lines = [
        f"schedule    {name}, {schedule.num_microbatches} microbatches",
        f"ranks       {schedule.num_ranks}, {schedule.num_stages} stages, placement {schedule.placement.name}",
        *([f"partition   {local.cut}"] if local.cut else []),
        f"stages here {held}",
        f"executor    {steps.ranks.executor.__name__}; {native.native_status()}",
        f"transport   {steps.ranks.transport.describe()}",
        "buffers     "
        + "; ".join(f"rank {r}: {program[r].num_slots} slots, {program[r].num_sends} sends" for r in local.by_rank),
    ]
    if schedule.placement.num_routes > 1:
        lines.append("copies      " + copies_text(stages))
    lines += [f"tied        {' = '.join(tie.names)} (stages {tie.stages})" for tie in local.ties]
    if seed is not None:
        lines.append(
            f"random      a random state for every stage and microbatch, from seed {seed} and the number of the step"
        )
    lines += [f"replicas    {text}" for text in replica_texts(stages)]
    lines += [f"recompute   {text}" for text in recompute_texts(stages)]
    if any(stage.held is not None and stage.held.with_gradient for stage in stages):
        lines.append("carried     once to each rank; gradients are summed on a rank, latest stage first")
    if schedule.splits_backward:
        lines.append("backward    " + split_text(stages))
    return lines


def copies_text(stages: Sequence[Stage]) -> str:
    """What the two copies of a stage share, with a warning about buffers."""
    whole = {stage.index: unwrapped(stage.module) for stage in stages}
    buffers = [
        state_prefix(module, i) + name for i, module in sorted(whole.items()) for name, _ in module.named_buffers()
    ]
    text = "every stage is held twice; parameters and their gradients are the same in both"
    if not buffers:
        return text
    return (
        f"{text}. WARNING: buffers differ between copies, each updated by half of the microbatches: {listed(buffers)}; "
        "a checkpoint has those of one copy"
    )


def replica_texts(stages: Sequence[Stage]) -> list[str]:
    """How the stages are parallelised, and when their gradients are averaged."""
    found: dict[str, list[str]] = {}
    for stage in stages:
        if stage.parallel is not None:
            found.setdefault(stage.parallel.description, []).append(str(stage.index))
    return [
        f"{description}: {'stage' if len(indices) == 1 else 'stages'} {', '.join(indices)}; gradients are averaged "
        "once per step, from REDUCE_GRAD on, after a stage's last B or W"
        for description, indices in found.items()
    ]


def recompute_texts(stages: Sequence[Stage]) -> list[str]:
    """The stages that recompute, by kind."""
    found: dict[str, set[int]] = {}
    for stage in stages:
        found.setdefault(stage.recompute, set()).add(stage.index)
    found.pop(NONE, None)
    return [f"{way}: stages {', '.join(map(str, sorted(indices)))}" for way, indices in found.items()]


def split_text(stages: Sequence[Stage]) -> str:
    """Which gradients are computed in W and which in I, and the peak of the memory held for W."""
    if native.load() is None:
        return f"not split: {WITHOUT_EXTENSION}"
    if all(stage.deferred is None for stage in stages):
        return "split: W computes the weight gradients of linears; the first step shows which"
    stages = sorted(stages, key=lambda stage: stage.index)
    parameters = [(stage, *pair) for stage in stages for pair in unwrapped(stage.module).named_parameters()]
    named = [(f"{stage.index}.{name}", stage.waits(p)) for stage, name, p in parameters if p.requires_grad]
    whole = Counter(re.sub(r"\d+", "*", name) for name, waits in named if not waits)
    kinds = listed((name if count == 1 else f"{name} ({count})" for name, count in whole.items()), most=None)
    fused = [stage for stage in stages if stage.fused_weight_grad and stage.parallel is None]
    in_place = "; added to .grad in place by their products" if fused else ""
    held = ", ".join(f"{stage.index}: {stage.peak_held_bytes / 2**20:.3g}" for stage in stages)
    return (
        f"split: gradients of {sum(waits for _, waits in named)} of {len(named)} parameters in W{in_place}; in I "
        f"(stage.name): {kinds}; peak memory held for W (MiB), by stage: {held}"
    )


def pairs_text(steps: Steps, program: Program, local: LocalStages) -> str:
    """How pairs of a forward and a backward run, and which always run in order."""
    ranks, counts, usage = steps.ranks, steps.ranks.pair_counts(), steps.random.in_pairs()
    stages = local.stages
    pairs = {pair for rank in local.by_rank for pair in _pairs_in(program, rank)}
    text = f"{ranks.pairs} ({ranks.why_pairs})"
    if ranks.pairs != IN_ORDER:
        why_in_order = _why_in_order(stages, usage, pairs, in_turns=ranks.pairs == IN_TURNS)
        text += "".join(f"; in order: {why}" for why in why_in_order)
    fused = sorted({stage.index for stage in stages if stage.fuses})
    if fused:
        text += f"; stages {listed(fused, most=None)} by their own overlapped_forward_backward, with each other"
    if counts:
        text += f"; so far {counts[TOGETHER]} together, {counts[IN_ORDER]} in order, {counts[FUSED]} by the modules"
        text += f", {counts[IN_TURNS]} in turns" if counts[IN_TURNS] else ""
    return text


def _pairs_in(program: Program, rank: int) -> set[tuple[int, int]]:
    """The stages (forward, backward) of a rank's pairs."""
    op, stage, _, pair_stage, *_ = program.columns[rank]
    here = op == Op.OVERLAP_F_B
    return set(zip(stage[here].tolist(), pair_stage[here].tolist(), strict=True))


def _why_in_order(
    stages: Sequence[Stage], usage: RngUsage | None, pairs: Collection[tuple[int, int]], *, in_turns: bool
) -> list[str]:
    found = ["stages that do not call fastpipe.all_to_all"] if in_turns else []
    own = {forward for forward, backward in pairs if forward == backward}
    replicated = {stage.index for stage in stages if stage.parallel is not None}
    if in_turns and replicated & own:
        found.append(f"stages {listed(sorted(replicated & own), most=None)} with themselves, as they are wrapped")
    elif replicated and not in_turns:
        found.append(
            f"stages {listed(sorted(replicated), most=None)}, whose replicas communicate in the order of the actions"
        )
    if usage is None:
        return [*found, "stages that use random numbers or write buffers in a recompute, which the first step shows"]
    if usage.draws and usage.recomputes:
        found.append("all, as stages of this process draw random numbers and recompute")
    elif usage.recomputes and own:
        found.append(
            f"stages {listed(sorted(own), most=None)} with themselves, as forward and recompute both write buffers"
        )
    return found
