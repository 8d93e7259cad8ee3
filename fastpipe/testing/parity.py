"""check_parity: compare one step of a pipeline with the same step of the unsplit model, on every rank.

Every process runs the pipeline's step; processes with the model also run the model's, and compare. Results, and the
gradients of processes without the model, go over the control plane, so a failure on one rank is an error on all.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn

from fastpipe.checks import check_type
from fastpipe.runtime.common import bytes_of, decoded, digest_of, encoded, keep_state, pytree, zero_grad_of
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.model import NamedTensor, Tie, TiedWeights, whole
from fastpipe.runtime.pipeline import Pipeline, StepResult
from fastpipe.runtime.stage import PER_MICROBATCH, Generators
from fastpipe.runtime.step import GradNorms, Norm
from fastpipe.testing.reference import Reference, reference_step, ties_in

_SHOWN = 20
_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@dataclass(frozen=True)
class Difference:
    """One difference from the unsplit model.

    Attributes:
        what: ``"loss"``, ``"metric"``, ``"added loss"``, ``"norm"``, ``"gradient"`` or ``"parameter"``.
        name: the parameter's name in the pipeline, the microbatch of a loss, or the name of a metric or added loss.
        relative: the largest difference of two elements divided by the unsplit model's largest element.
        ulps: the largest difference in representable numbers; 0 if only the signs of zeros differ.
    """

    what: str
    name: str = ""
    stage: int | None = None
    relative: float = math.inf
    ulps: float = math.nan
    note: str = ""

    def row(self) -> tuple[str, ...]:
        """The cells of the table."""
        stage = "" if self.stage is None else str(self.stage)
        relative = "" if math.isnan(self.relative) else f"{self.relative:.2g}"
        ulps = "" if math.isnan(self.ulps) else f"{self.ulps:.0f}" if self.ulps < 1e6 else f"{self.ulps:.1g}"
        return self.what, self.name, stage, relative, ulps, self.note


@dataclass(frozen=True)
class Parity:
    """The result of `fastpipe.check_parity`; prints as a table, the worst first.

    Attributes:
        differences: values that are not bit-identical, the worst first.
        num_compared: the number of compared gradients.
        loss: the pipeline's, and the unsplit model's.
        norm: of all gradients, the pipeline's and the unsplit model's.
        hints: possible reasons.
        zeros: the parameters whose gradient is zeros, and None in the unsplit model; weight decay changes only the
            former.
    """

    differences: Sequence[Difference]
    num_compared: int
    loss: tuple[float, float]
    norm: tuple[float, float]
    hints: Sequence[str] = field(default=())
    zeros: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether loss, gradients and norm are bit-identical."""
        return not self.differences

    def __str__(self) -> str:
        zeros = f"gradients of zeros, which are None in the unsplit model: {', '.join(self.zeros)}"
        notes = [zeros] if self.zeros else []
        if self.ok:
            equal = f"loss {self.loss[0]:.6g}, norm {self.norm[0]:.6g} and {self.num_compared} gradients"
            return "\n".join([f"parity: {equal} are those of the unsplit model, bit for bit", *notes])
        lines = [
            f"parity: {len(self.differences)} differences from the unsplit model ({self.num_compared} gradients "
            "compared), the worst first",
            f"loss {self.loss[0]:.9g} instead of {self.loss[1]:.9g}; norm {self.norm[0]:.9g} instead of "
            f"{self.norm[1]:.9g}",
            *_table(self.differences[:_SHOWN]),
        ]
        if len(self.differences) > _SHOWN:
            lines.append(f"and {len(self.differences) - _SHOWN} more")
        return "\n".join([*lines, *notes, *self.hints])


def _table(differences: Iterable[Difference]) -> list[str]:
    rows = [("what", "name", "stage", "relative", "ulps", ""), *(difference.row() for difference in differences)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 1, 5)
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def worst_first(differences: Iterable[Difference]) -> list[Difference]:
    """The largest difference per value, sorted by size."""
    worst: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        key = difference.what, difference.name
        if key not in worst or difference.relative > worst[key].relative:
            worst[key] = difference
    return sorted(worst.values(), key=lambda found: -found.relative)


def compared(
    what: str, name: str, stage: int | None, found: torch.Tensor | None, expected: torch.Tensor | None
) -> list[Difference]:
    """One difference, or none. A missing gradient counts as zeros."""
    if found is None or expected is None:
        given = found if expected is None else expected
        if given is None or not given.any():
            return []
        zeros = torch.zeros_like(given)
        found, expected = (zeros, expected) if found is None else (found, zeros)
    assert expected is not None
    kinds = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (found, expected)]
    if kinds[0] != kinds[1]:
        return [Difference(what, name, stage, note=f"{kinds[0]} instead of {kinds[1]}")]
    if torch.equal(bytes_of(found), bytes_of(expected)):  # of NaN, too
        return []
    relative, ulps = measured(found, expected)
    note = "only the signs of zeros" if ulps == 0 else "" if math.isfinite(relative) else "not finite"
    return [Difference(what, name, stage, relative, ulps, note)]


def measured(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """Relative difference and distance in representable numbers; infinite if only one of two elements is finite."""
    a, b = (_real(tensor) for tensor in (found, expected))
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not (a[differs].isfinite() & b[differs].isfinite()).all():
        return math.inf, math.nan
    apart = (a.double() - b.double())[differs].abs()
    if not apart.numel():
        return 0.0, 0.0
    scale = float(b[b.isfinite()].double().abs().max())
    return float(apart.max()) / scale if scale else math.inf, _ulps(a[differs], b[differs])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    integer = _INTEGERS.get(a.dtype)
    if integer is None:
        return math.nan
    x, y = (_ordered(tensor.view(integer).long(), torch.iinfo(integer).min) for tensor in (a, b))
    same_sign = (x < 0) == (y < 0)
    # with different signs the difference can overflow an integer
    apart = torch.where(same_sign, (x - y).abs().double(), x.double().abs() + y.double().abs())
    return float(apart.max())


def _ordered(bits: torch.Tensor, lowest: int) -> torch.Tensor:
    """Map the bits of floats to integers in the same order; adjacent floats differ by 1, both zeros are 0."""
    return torch.where(bits < 0, lowest - bits, bits)


def parity_of(
    differences: Iterable[Difference],
    num_compared: int,
    losses: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor],
    hints: Mapping[str, bool],
    zeros: Sequence[str] = (),
) -> Parity:
    """The result, with the hints that apply."""
    loss, norm = (tuple(map(float, pair)) for pair in (losses, norms))
    chosen = [hint for hint, applies in hints.items() if applies]
    found = tuple(worst_first(differences))
    return Parity(found, num_compared, (loss[0], loss[1]), (norm[0], norm[1]), chosen, zeros)


Key = tuple[int, str]
"""Stage and name of a parameter."""
Gradients = dict[Key, torch.Tensor | None]

_STALE = (
    "parameters differ: load the pipeline's state into the model before the check; where ranks are processes, each "
    "trains only its own stages"
)
_RANDOM = "random numbers were drawn: they depend on the order of the actions; compare without dropout, or in eval mode"
_MERGED = (
    "a weight that several stages use has one name in the model, which adds its uses in another order: last bits may "
    "differ"
)


def check_parity(
    pipe: Pipeline,
    model: nn.Module | Sequence[nn.Module] | None,
    batch: tuple[Any, Any],
    *,
    num_microbatches: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Parity:
    """Run one step of the pipeline and of the unsplit model; compare losses, metrics, every gradient and the norm.

    Collective: call it on every rank, and in every replica. Each replica compares its own batch, before gradients are
    averaged; parameters that ``fully_shard`` shards are gathered. Gradients, buffers, embeddings with a ``max_norm``
    and torch's random generators are restored; other parameters do not change. The unsplit model's step is
    `fastpipe.testing.reference_step`.

    Args:
        pipe: the pipeline.
        model: the unsplit model or the list of its layers, with the same parameters. It may be the model that the
            pipeline was built from. If ranks are processes, some may give None; their gradients are sent to a rank with
            the model. Parameters are matched by name, with or without the number of the stage, or else by order.
        batch: ``(input, target)`` as whole batches or lists of microbatches; the input may be a tuple of arguments, the
            target None if the model returns its loss.
        num_microbatches: overrides the pipeline's in this step.
        kwargs: keyword arguments of the model.

    Returns:
        The differences. ``.ok`` is true if everything is bit-identical; ``print`` shows a table, the worst first.

    Raises:
        TypeError: if ``pipe`` is not a pipeline or ``model`` not a model.
        ValueError: if no rank has the model, if it lacks parameters of the pipeline, or without a loss.
        StepError: if another rank could not take part.
    """
    check_type(Pipeline, pipe=pipe)
    if isinstance(model, str) or not isinstance(model, nn.Module | Sequence | None):
        raise TypeError(f"model is a {type(model).__name__}: give the unsplit model, or the list of its layers")
    check_type(Mapping | None, kwargs=kwargs)
    unsplit = None if model is None else whole(model)
    count = pipe.num_microbatches if num_microbatches is None else num_microbatches
    with _restored(pipe, unsplit) as rewind:
        return _check(pipe, model, unsplit, batch, kwargs or {}, count, rewind)


def _check(
    pipe: Pipeline,
    given: nn.Module | Sequence[nn.Module] | None,
    model: nn.Module | None,
    batch: tuple[Any, Any],
    kwargs: Mapping[str, Any],
    count: int,
    rewind: Callable[[], bool],
) -> Parity:
    """The pipeline's step, then the unsplit model's from the same buffers and generators.

    Args:
        given: the model as the user gave it; ``model`` is one module.
        rewind: restores buffers and generators, and returns whether random numbers were drawn.
    """
    all_gather, step_count = pipe._steps.all_gather, pipe.step_count
    copies: list[tuple[Any, dict[str, Any]]] = []

    def take_batch() -> Reply:
        """Copy the batch, so that the user's tensors get no gradients."""
        if not isinstance(batch, tuple | list) or len(batch) != 2:
            raise ValueError(f"batch is a {type(batch).__name__}: give (input, target); the target may be None")
        copies.extend(pytree.tree_map(_copied, (batch, dict(kwargs))) for _ in range(2))
        return {}

    all_gather("check_parity", take_batch)
    result = _step(pipe, *copies[0], count)
    if result.loss is None:
        raise ValueError("pipe: its step has no loss; give it a loss_fn, or a last stage that returns a loss")
    drew = rewind()
    named, gradients = pipe._named_parameters(), _whole_gradients(pipe)

    def begin() -> Reply:
        """What other ranks need from this rank for the comparison."""
        parameters = [[p.stage, p.name, digest_of(_whole(p.tensor)), p.is_echo] for p in named]
        return {"has_model": model is not None, "parameters": parameters, "drew": drew}

    replies = all_gather("check_parity, gradients", begin)
    names = _all_names(replies)
    sent = _gather_gradients(pipe, {} if model is not None else gradients, replies)
    norms, norm = _norms(pipe, named, gradients)

    def compare() -> Reply:
        """Run the unsplit model's step, and list the differences."""
        if given is None or model is None:
            return {"differences": []}
        parameters = _parameters_by_key(model, names)
        digests = {(stage, name): digest for reply in replies for stage, name, digest, _ in reply["parameters"]}
        stale = [key for key, p in parameters.items() if digest_of(_whole(p)) != digests[key]]
        ties = ties_in(model, pipe._local.ties)
        for parameter in model.parameters():
            parameter.grad = None
        reference = _reference(pipe, given, *copies[1], count, step_count, ties)
        grads = {key: _dense(parameter.grad) for key, parameter in parameters.items()}
        expected_norm = torch.nn.utils.get_total_norm(_expected(parameters, grads, norms))
        everywhere = {**gradients, **sent}
        found = [
            *(Difference("parameter", name, stage, note="not the pipeline's") for stage, name in stale),
            *_compare_losses(result, reference),
            *_compare_reports(result, reference),
            *compared("norm", "", None, norm, expected_norm),
            *_compare_gradients(everywhere, grads),
            *_gradients_elsewhere(model, parameters.values()),
        ]
        return {
            "differences": [asdict(difference) for difference in found],
            "zeros": [
                key[1]
                for key, grad in grads.items()
                if grad is None and (ours := everywhere.get(key)) is not None and not ours.any()
            ],
            "expected": [float(reference.loss), float(expected_norm)],
            "merged": len(ties) < len(pipe._local.ties),
        }

    answers = all_gather("check_parity, comparison", compare)
    found = [Difference(**difference) for answer in answers for difference in answer["differences"]]
    expected_loss, expected_norm = map(torch.tensor, next(a["expected"] for a in answers if "expected" in a))
    hints = {
        _STALE: any(difference.what == "parameter" for difference in found),
        _RANDOM: any(reply["drew"] for reply in replies),
        _MERGED: any(answer.get("merged") for answer in answers),
    }
    zeros = sorted({name for answer in answers for name in answer.get("zeros", ())})
    return parity_of(found, len(names), (result.loss, expected_loss), (norm, expected_norm), hints, zeros)


def _step(pipe: Pipeline, batch: Any, kwargs: Mapping[str, Any], count: int) -> StepResult:
    inputs, target = batch
    # without a reduction over replicas: the model has only this replica's batch
    alone = pipe.no_sync() if pipe._steps.programs.parallel else contextlib.nullcontext()
    with alone, pipe._steps.part_of("check_parity"):
        return pipe.step(inputs, target=target, num_microbatches=count, **kwargs)


def _all_names(replies: Sequence[Reply]) -> list[Key]:
    """Stage and name of every parameter of the pipeline, in the unsplit model's order."""
    if not any(reply["has_model"] for reply in replies):
        raise ValueError("model is None on every rank: give the unsplit model on one rank at least")
    listed = [parameter for reply in replies for parameter in reply["parameters"]]
    # a tied parameter is in the order of its first stage
    listed.sort(key=lambda parameter: bool(parameter[3]))
    return sorted(dict.fromkeys((stage, name) for stage, name, *_ in listed), key=lambda key: key[0])


def _gather_gradients(pipe: Pipeline, mine: Gradients, replies: Sequence[Reply]) -> Gradients:
    """Send the gradients of ranks without the model, which are ``mine`` there, to the first rank with it."""
    if all(reply["has_model"] for reply in replies):
        return {}
    own = [[*key, grad if grad is None else encoded(grad)] for key, grad in mine.items()]
    sent = pipe._steps.all_gather("check_parity, gradients sent", lambda: {"gradients": own})
    if pipe.rank != next(rank for rank, reply in enumerate(replies) if reply["has_model"]):
        return {}
    listed = (grad for reply in sent for grad in reply["gradients"])
    return {(stage, name): grad if grad is None else decoded(*grad) for stage, name, grad in listed}


def _parameters_by_key(model: nn.Module, names: Sequence[Key]) -> dict[Key, nn.Parameter]:
    """The model's parameters by the pipeline's names; matched by name (stage number optional), or by order.

    A traced model lacks those that the forward does not use.
    """
    own = dict(model.named_parameters())
    # by any of its names: if the model's last module comes first, its own is not the first stage's
    named = dict(model.named_parameters(remove_duplicate=False))
    for candidates in ([name for _, name in names], [name.partition(".")[2] for _, name in names]):
        found = [named[name] for name in candidates if name in named]
        if len(found) == len({id(p) for p in found}) == len(names):
            return dict(zip(names, found, strict=True))
    if len(own) != len(names):
        raise ValueError(
            f"model has {len(own)} parameters but the pipeline has {len(names)}: give the model that the pipeline's "
            "stages are cut from"
        )
    return dict(zip(names, own.values(), strict=True))


def _reference(
    pipe: Pipeline,
    model: nn.Module | Sequence[nn.Module],
    batch: Any,
    kwargs: Mapping[str, Any],
    count: int,
    step_count: int,
    ties: Sequence[Tie],
) -> Reference:
    """The unsplit model's step, with the pipeline's arguments."""
    arguments = pipe._steps.batch
    with torch.enable_grad():
        return reference_step(
            model,
            batch,
            pipe._steps.programs.schedule(count),
            arguments.loss_fn,
            loss_reduction=arguments.loss_reduction,
            split_rules=arguments.split,
            kwargs=kwargs,
            ties=ties,
            rng=None if pipe._build.seed is None else PER_MICROBATCH,
            seed=pipe._build.seed,
            step_count=step_count,
            partition=pipe._arguments.model.partition,
            metrics=arguments.metrics,
            grad_dtype=pipe.grad_dtype,
            loss_scale=pipe._steps.scale_now(),
        )


def _compare_losses(result: StepResult, reference: Reference) -> list[Difference]:
    assert result.loss is not None and result.losses is not None
    found = compared("loss", "", None, result.loss, reference.loss)
    for i, (ours, theirs) in enumerate(zip(result.losses, reference.losses, strict=True)):
        found += compared("loss", f"microbatch {i}", None, ours, theirs)
    return found


def _compare_reports(result: StepResult, reference: Reference) -> list[Difference]:
    """Differences of metrics and of losses that stages added."""
    found = []
    for what, ours, theirs in (
        ("metric", result.metrics, reference.metrics),
        ("added loss", result.added_losses, reference.added_losses),
    ):
        for name in sorted({*ours, *theirs}):
            if name not in ours or name not in theirs:
                found.append(Difference(what, name, note="only in the " + ("model" if name in theirs else "pipeline")))
                continue
            for pair in zip(*(pytree.tree_leaves(values[name]) for values in (ours, theirs)), strict=True):
                found += compared(what, name, None, *pair) if isinstance(pair[0], torch.Tensor) else []
    return found


def _compare_gradients(gradients: Gradients, expected: Gradients) -> Iterator[Difference]:
    for (stage, name), grad in gradients.items():
        yield from compared("gradient", name, stage, grad, expected[stage, name])


def _gradients_elsewhere(model: nn.Module, parameters: Iterable[nn.Parameter]) -> list[Difference]:
    """The model's gradients of other parameters than the pipeline's."""
    known = set(map(id, parameters))
    others = [name for name, p in model.named_parameters() if id(p) not in known and p.grad is not None]
    return [Difference("gradient", name, note="not in the pipeline") for name in others]


def _norms(
    pipe: Pipeline, named: Iterable[NamedTensor[nn.Parameter]], gradients: Gradients
) -> tuple[Sequence[Norm], torch.Tensor]:
    """The norm of each of the pipeline's gradients, and that of all together. Collective."""
    own = [
        NamedTensor(p.stage, p.name, grad, p.is_echo) for p in named if (grad := gradients[p.stage, p.name]) is not None
    ]
    gathering = GradNorms()
    steps = pipe._steps
    values, _ = gathering.gather(steps.all_gather, "check_parity, norms", own, lambda: (2.0, {}), steps.ranks.timeout)
    return gathering.norms, gathering.total(values, 2.0, pipe.device)


def _expected(parameters: Mapping[Key, nn.Parameter], grads: Gradients, norms: Sequence[Norm]) -> list[torch.Tensor]:
    """The unsplit model's gradients; zeros if only the pipeline has one, as the norm depends on their number."""
    there = {(norm.stage, norm.name) for norm in norms}
    given = {key: _whole(zero_grad_of(p)) if grads[key] is None else grads[key] for key, p in parameters.items()}
    return [grad for key, grad in given.items() if grad is not None and (key in there or grads[key] is not None)]


def _whole_gradients(pipe: Pipeline) -> Gradients:
    """This replica's gradients in the step, unsharded."""
    parallel = {stage.index: stage.parallel for stage in pipe._steps.stages if stage.parallel is not None}
    held = [(parallel[index], module) for index, module in pipe.stage_modules.items() if index in parallel]
    holders = {id(parameter): holder for holder, module in held for parameter in module.parameters()}

    def whole(parameter: nn.Parameter) -> torch.Tensor | None:
        holder = holders.get(id(parameter))
        return parameter.grad if holder is None else holder.whole_gradient(parameter)

    found = {(p.stage, p.name): whole(p.tensor) for p in pipe._named_parameters()}
    copies = pipe._steps.copies
    sums = copies.whole_sums(whole) if isinstance(copies, TiedWeights) else {}
    found |= {key: sums[key[1]] for key in found if key[1] in sums}
    return {key: _dense(grad) for key, grad in found.items()}


def _dense(grad: torch.Tensor | None) -> torch.Tensor | None:
    """A dense gradient, as the bytes of sparse ones are not comparable, and the whole of a DTensor."""
    return None if grad is None else _whole(grad) if grad.layout is torch.strided else grad.to_dense()


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    """The whole of a tensor that may be sharded over replicas. Collective if it is."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def _copied(leaf: Any) -> Any:
    """A copy of a tensor, in which a leaf of the graph stays one; any other value itself."""
    if isinstance(leaf, Iterator):
        raise ValueError("batch has an iterator, which can be read only once: give whole batches or lists")
    return leaf.detach().clone().requires_grad_(leaf.requires_grad) if isinstance(leaf, torch.Tensor) else leaf


@contextlib.contextmanager
def _restored(pipe: Pipeline, model: nn.Module | None) -> Iterator[Callable[[], bool]]:
    """Context that saves gradients and restores them, buffers and random generators.

    Yields:
        A function that restores buffers and generators, and returns whether random numbers were drawn.
    """
    held = [stage.module for stage in pipe._steps.stages]
    modules = {id(m): m for m in [*held, *([] if model is None else [model])]}.values()
    grads = [(p, p.grad) for module in modules for p in module.parameters()]
    restore_state = keep_state(modules)
    generators, step_count = Generators(pipe.device), pipe.step_count
    states = generators.states()

    def rewind() -> bool:
        drew = not generators.match(states)
        generators.restore(states)
        restore_state()
        return drew

    for parameter, _ in grads:
        parameter.grad = None
    restores = [stage.parallel.put_aside() for stage in pipe._steps.stages if stage.parallel is not None]
    try:
        yield rewind
    finally:
        rewind()
        for restore in restores:
            restore()
        pipe.step_count = step_count
        for parameter, grad in grads:
            parameter.grad = grad
