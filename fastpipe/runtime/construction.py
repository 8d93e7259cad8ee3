"""How a Pipeline is built. Each function takes what the previous one returned.

    Arguments ─► World ─► BuildRequest (all ranks agree) ─► LocalStages (all ranks agree) ─► Transport ─► Steps

The processes agree twice: on the schedule and its program before stages are built, and on the stages before
connections are. An error on one rank is raised on all ranks and names that rank.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpipe._version import __version__
from fastpipe.hardware_queues import VARIABLE, queues_text, why_too_few
from fastpipe.placement import Placement
from fastpipe.runtime import native
from fastpipe.runtime.arguments import Arguments, ExecutionArguments, process_group
from fastpipe.runtime.common import (
    Failure,
    FailureError,
    attended,
    lost_named,
    on_meta,
    set_grad_dtype,
    thread_state,
    wants_streams,
)
from fastpipe.runtime.coordination import (
    Control,
    Cores,
    Processes,
    RanksPerHost,
    Reply,
    agree,
    find_cores,
)
from fastpipe.runtime.data_parallel import (
    DataParallel,
    check_not_peers,
    check_not_sharded,
    check_parallel,
    find_data_parallel,
    others_in,
    replicate,
    same_text,
)
from fastpipe.runtime.executor import Executor, LocalRanks, NativeExecutor, RecordedRanks, executor_class, why_not
from fastpipe.runtime.model import (
    MEASURED,
    RestOfModel,
    StageCopies,
    Tie,
    Unfilled,
    as_layers,
    between_ranks,
    build_modules,
    check_device,
    check_memory,
    check_same_kinds,
    costs_here,
    cut_by,
    cut_text,
    find_device,
    find_ties,
    from_torch,
    group_of,
    kinds_of_ties,
    layer_ranges,
    make_copies,
    make_tied,
    modules_by_rank,
    named_as_held,
    names_later,
    own_modules,
    prefixes_message,
    prefixes_of,
    recompute_of,
    share,
    skeleton,
    torch_stages_per_rank,
)
from fastpipe.runtime.stage import (
    IN_ORDER,
    PER_MICROBATCH,
    HeldTensors,
    RandomNumbers,
    Stage,
    TreespecCache,
    held_tensors,
    pair_policy,
)
from fastpipe.runtime.step import (
    Audit,
    Programs,
    Steps,
    check_audit,
    check_audited,
    computes_on,
    longest_wait,
    options_with_stages,
    why_not_reproducible,
)
from fastpipe.runtime.transport import (
    Loopback,
    Membership,
    MeshGroups,
    SharedCall,
    Transport,
    membership,
    ranks_per_host,
    select_transport,
)
from fastpipe.schedule import Schedule

logger = logging.getLogger("fastpipe")


@dataclass(frozen=True)
class World:
    """Where a pipeline is built and runs, and by which executor.

    Attributes:
        replicas: the construction of all replicas, with ``data_parallel=``.
        errors: the first error in the arguments evaluated so far, if any; taken from here and raised by
            `agree_on_request`, on all ranks.
    """

    device: torch.device
    member: Membership
    ranks_per_host: RanksPerHost
    control: Control
    cores: Cores
    executor: type[Executor]
    replicas: SharedCall
    errors: list[Exception]

    @property
    def is_single_process(self) -> bool:
        """Whether the ranks are threads of a single process."""
        return self.member.size == 1

    @property
    def peers(self) -> list[int]:
        """The processes of the pipeline's other ranks."""
        return [] if self.is_single_process else [rank for rank in self.member.ranks if rank != dist.get_rank()]

    def lost(self) -> Failure | None:
        """The failure that keeps another process, also of a replica, from building its pipeline, if any."""
        return self.control.lost() or self.replicas.lost()


def find_world(arguments: Arguments) -> World:
    """Find this process's place, and connect to the other processes.

    Raises:
        StepError: if the store of the process group does not answer.
        ValueError: in a process that is not in the mesh or group.
    """
    arguments.execution.check_member()
    try:
        return _find_world(arguments)
    except FailureError as error:
        raise error.failure.error("could not build the pipeline") from error


def _find_world(arguments: Arguments) -> World:
    errors: list[Exception] = []

    def valid(find: Callable[[], Any], instead: Any) -> Any:
        try:
            return find()
        except (FailureError, OSError):  # no process can be informed, or `membership` has informed them
            raise
        except Exception as error:  # raised by `agree_on_request`, on all ranks
            if not errors:
                errors.append(error)
            return instead

    model, execution = arguments.model, arguments.execution
    timeout = valid(execution.checked_timeout, 600.0)
    device = valid(lambda: find_device(model.stages, model.device), torch.device("cpu"))
    group = valid(execution.pipeline_group, None)
    member = valid(lambda: membership(group_of(model.stages) if group is None else group, device, timeout), None)
    if member is None:  # the error is raised when all processes know it
        if not dist.is_initialized():
            raise errors[0]
        member = membership(None, device, timeout)
    valid(member.check_job, None)
    here = ranks_per_host(timeout)
    control = Control()
    meets = valid(execution.other_dimensions, {}) if group is not None else {}
    if member.size > 1 or meets:  # also of one rank, whose stages meet those of other pipelines
        pipelines = valid(execution.pipelines, {}) if meets else {}
        member = member.named()
        control = _control(member, here, pipelines)
    cores = valid(lambda: find_cores(member.size, device), Cores())
    executor = valid(lambda: executor_class(execution.executor, device, execution.overlap), Executor)
    # without data_parallel= the replicas are unknown before the stages are built
    processes = () if model.data_parallel is None else valid(lambda: _processes_of(model.data_parallel), ())
    replicas = SharedCall(member, processes, 1, maps_ranks=not control.pipeline)
    return World(device, member, here, control, cores, executor, replicas, errors)


def _processes_of(data_parallel: Any) -> Sequence[int]:
    processes: Sequence[int] = dist.get_process_group_ranks(process_group(data_parallel, "data_parallel", "dp"))
    return processes


def _control(member: Membership, here: RanksPerHost, pipelines: Mapping[str, tuple[int, ...]]) -> Control:
    """The control of a pipeline, or of one of several pipelines whose stages meet."""
    store, timeout = member.store(), member.timeout
    if member.ranks not in pipelines.values():
        return Processes(store, member.rank, member.size, timeout, here, member.identity)
    first = list(pipelines.values()).index(member.ranks) * member.size
    ranks = tuple(rank for own in pipelines.values() for rank in own)
    mesh = member.among(ranks, first + member.rank)
    return Processes(mesh.store(), mesh.rank, member.size, timeout, here, mesh.identity, list(pipelines), store)


@dataclass(frozen=True)
class BuildRequest:
    """What is determined before stages are built; the same on every rank.

    Attributes:
        programs: the schedule, with its program proved for the transport's lanes.
        costs: of the layers, for the partition; None if it needs none.
        seed: of the random numbers per stage and microbatch; None for torch's own generators.
    """

    programs: Programs
    num_microbatches: int
    costs: list[float] | None
    unit: str
    seed: int | None

    @property
    def schedule(self) -> Schedule:
        """The schedule."""
        return self.programs.schedule(self.num_microbatches)

    def signature(self, arguments: Arguments, num_processes: int) -> dict[str, str]:
        """Text by argument that must be the same on every rank; what follows from other arguments is last."""
        if isinstance(arguments.schedule.schedule, Schedule):  # its name is a label; "program" compares its actions
            values = {"schedule": "a Schedule"}
        else:
            values = {"schedule": self.schedule.name, "schedule_options": str(dict(self.schedule.options))}
        values |= {"num_microbatches": str(self.num_microbatches), **arguments.signature}
        values |= {"partition": f"by {self.unit}"} if self.unit else {}
        if num_processes > 1:
            program = self.programs.program(self.num_microbatches, forward_only=False)
            values |= {"fastpipe": f"version {__version__}", "recv_lookahead": str(self.programs.recv_lookahead)}
            values |= {VARIABLE: queues_text(self.programs.queues)} if self.programs.queues is not None else {}
            values |= {"stage_to_rank": str(program.placement.routes), "program": program.digest()}
        return values


def agree_on_request(arguments: Arguments, world: World) -> BuildRequest:
    """Check the arguments, make the schedule and prove its program. All ranks succeed, or all raise."""

    def make() -> tuple[BuildRequest, Reply]:
        if world.errors:
            raise world.errors.pop()  # it has frames that have the list
        arguments.check()
        model, given, execution = arguments.model, arguments.schedule, arguments.execution
        size = world.member.size
        num_ranks = given.find_num_ranks(size)
        if world.is_single_process and num_ranks > 1 and (meets := execution.other_dimensions()):
            raise ValueError(
                f"num_ranks = {num_ranks}: ranks that are threads would start the collectives of their stages over "
                f"{', '.join(meets)} in any order; start one process per rank with torchrun"
            )
        world.ranks_per_host.join(num_ranks if world.is_single_process else 1)
        lanes = execution.lanes(num_ranks, size)
        found = torch_stages_per_rank(model.stages, num_ranks)
        options = options_with_stages(given.schedule, given.schedule_options, given.stages_per_rank, found)
        queues = execution.queues(world.device, size)
        programs = Programs(
            given.schedule, num_ranks, options, given.stage_to_rank, lanes, given.recv_lookahead, queues
        )
        num_microbatches = given.find_num_microbatches()
        schedule = programs.schedule(num_microbatches)
        programs.program(num_microbatches, forward_only=False)
        arguments.batch.check_loss_parameters(schedule)
        partition = model.partition
        costs = costs_here(model.stages, partition, model.example, world.member.rank)
        unit = MEASURED.get(partition, "") if isinstance(partition, str) else ""
        seed = torch.initial_seed() if arguments.batch.rng == PER_MICROBATCH else None
        request = BuildRequest(programs, num_microbatches, costs, unit, seed)
        return request, {"arguments": request.signature(arguments, size), "seed": seed, "costs": costs}

    request, replies = agree(world.control, make)
    # times differ between processes, and all pipelines of a mesh must cut alike
    everywhere = [replies[0] | {"pipeline": world.control.pipeline}, *replies.elsewhere]
    first = min(everywhere, key=lambda reply: str(reply["pipeline"]))
    return replace(request, costs=first["costs"])


@dataclass(frozen=True)
class LocalStages:
    """The stages of this process.

    Attributes:
        by_rank: the stages of every local rank, by index.
        cut: the partition as text; empty for stages that the user split.
        layer_counts: the number of layers of every stage; None for stages that the user split.
        on_meta: whether some stage, here or on another rank, has no values yet.
        audited: copies of all stages without memory, for audits; empty without.
    """

    modules: dict[int, nn.Module]
    by_rank: dict[int, dict[int, Stage]]
    ties: list[Tie]
    cut: str
    layer_counts: list[int] | None
    on_meta: bool
    audited: dict[int, Stage]
    rest: RestOfModel

    @property
    def stages(self) -> list[Stage]:
        """The stages of all local ranks."""
        return [stage for held in self.by_rank.values() for stage in held.values()]


def build_stages(arguments: Arguments, request: BuildRequest, world: World, *, audits: bool = False) -> LocalStages:
    """Build the local stages, wrap them, and find the weights they share.

    Args:
        arguments: with the partition as numbers of layers, and without types of torch.distributed.pipelining.
        audits: whether this process may compute any stage for an audit.

    Raises:
        TypeError, ValueError: naming the argument.
    """
    model = arguments.model
    placement = request.schedule.placement
    layers = as_layers(model.stages)
    stages = model.stages if layers is None else layers
    cuts = layer_ranges(layers, placement.num_stages, model.partition)
    ranks = list(range(placement.num_ranks)) if world.is_single_process else [world.member.rank]
    local = sorted({stage for rank in ranks for stage in placement.stages_of(rank)})
    cut = "" if layers is None else cut_text(layers, cuts, request.unit, request.costs)
    every = build_modules(stages, placement.num_stages, range(placement.num_stages), cuts) if audits else {}
    copies = {index: skeleton(module) for index, module in every.items()}
    modules = own_modules(build_modules(stages, placement.num_stages, local, cuts))
    check_device(modules, world.device)
    ties = find_ties(layers, modules, placement.num_stages, cuts, model.tied)
    share(ties, modules)
    check_memory(layers, modules, ties)
    rest = RestOfModel(layers, modules, ties)
    on_meta_here = [index for index, module in modules.items() if on_meta([module])]
    if model.data_parallel is not None:
        modules = _replicated(modules, model.data_parallel, on_meta_here, len(ranks), world)
    for index, module in modules.items():
        check_parallel(index, find_data_parallel(module, index), len(ranks), placement.num_routes, world.peers)
    by_rank = modules_by_rank(placement, ranks, modules)

    def stages_of(modules: Mapping[int, nn.Module]) -> dict[int, Stage]:
        held = held_tensors(placement, model.cache_carried)
        return {
            index: _make_stage(index, module, placement, held, arguments, request, world)
            for index, module in modules.items()
        }

    made = LocalStages(
        modules=modules,
        by_rank={rank: stages_of(modules_here) for rank, modules_here in by_rank.items()},
        ties=ties,
        cut=cut,
        layer_counts=None if layers is None else [len(part) for part in cuts],
        on_meta=bool(on_meta_here),
        audited=stages_of(copies),
        rest=rest,
    )
    if world.is_single_process:
        _set_later(made.stages, [_names_taken(made.stages)])
        return replace(made, ties=named_as_held(ties, prefixes_of([prefixes_message(modules)])))
    return made


def _replicated(
    modules: Mapping[int, nn.Module], group: Any, on_meta: Sequence[int], num_local_ranks: int, world: World
) -> dict[int, nn.Module]:
    """The modules in DistributedDataParallel; ``on_meta`` has the stages without memory."""
    if on_meta:
        raise ValueError(
            f"data_parallel: stage {on_meta[0]} is on the meta device, and DistributedDataParallel needs its values: "
            "apply fully_shard to the layers instead, or give stages as a function stage_index -> module, which makes "
            "only this process's stages, with memory"
        )
    replicas = process_group(group, "data_parallel", "dp")
    if num_local_ranks > 1 and replicas.size() > 1:  # before the constructor, in which replicas wait for each other
        raise ValueError(
            "data_parallel: the ranks are threads of this process, which would run the collectives of their stages in "
            "any order; start one process per rank with torchrun"
        )
    check_not_peers("data_parallel", "give mesh['dp']", dist.get_process_group_ranks(replicas), world.peers)
    if replicas in DataParallel.broken:
        raise _broken("data_parallel", DataParallel.broken[replicas])
    state = thread_state(world.device)

    def attend(wrap: Callable[[], nn.Module]) -> nn.Module:
        def wrapped() -> nn.Module:
            with state():
                return wrap()

        try:
            return attended(wrapped, world.lost, world.member.limit)
        except FailureError as error:
            # the thread may still be in a collective, and would take part in that of another constructor
            DataParallel.broken[replicas] = error.failure.cause
            raise

    return replicate(modules, replicas, attend)


def _broken(group: str, cause: str) -> ValueError:
    return ValueError(
        f"{group} cannot be used after a failure ({cause}); make a new group or mesh, and wrap the stages over it, or "
        "restart the processes"
    )


def _make_stage(
    index: int,
    module: nn.Module,
    placement: Placement,
    held: HeldTensors | None,
    arguments: Arguments,
    request: BuildRequest,
    world: World,
) -> Stage:
    model, execution = arguments.model, arguments.execution
    sends = any(len(set(route[index : index + 2])) > 1 for route in placement.routes)
    stage = Stage(
        index,
        module,
        placement.num_stages,
        arguments.batch.loss_fn,
        recompute_of(model.recompute, index, module),
        (execution.forward_context, execution.backward_context),
        fused_weight_grad=model.fused_weight_grad,
        grad_dtype=model.grad_dtype,
        mesh=execution.mesh,
        treespecs=None if world.device.type == "cpu" else TreespecCache(index, world.device),
        why_one_tensor=(why_too_few() or "") if sends and request.programs.queues is not None else "",
        wrapped=model.data_parallel is not None,
        held=held,
    )
    if model.grad_dtype is not None:
        check_not_sharded(index, stage.parallel, model.grad_dtype)
        set_grad_dtype(module, model.grad_dtype)
    return stage


def agree_on_stages(arguments: Arguments, request: BuildRequest, world: World) -> tuple[Arguments, LocalStages]:
    """Build the local stages and check them against those of the other ranks. All ranks succeed, or all raise.

    Returns:
        The arguments as `build_stages` takes them, and the local stages.
    """
    execution = arguments.execution
    schedule = request.schedule

    def make() -> tuple[tuple[Arguments, LocalStages], Reply]:
        partition = cut_by(arguments.model.partition, request.costs, schedule.num_stages)
        audits = _audits(arguments, schedule, world)
        stages, tied = from_torch(arguments.model.stages, schedule.num_stages, arguments.model.tied)
        model = replace(arguments.model, partition=partition, stages=stages, tied=tied)
        resolved = replace(arguments, model=model)
        local = build_stages(resolved, request, world, audits=audits)
        check_audited(execution.audit, local.stages)
        execution.check_replicas(local.stages)
        _check_groups(local.stages)
        apart = [list(tie.names) for tie in local.ties if between_ranks([tie], schedule.placement)]
        values = request.signature(arguments, world.member.size)
        values |= {"audit": f"{execution.audit} on {computes_on(world.device)}"} if audits else {}
        values |= {"tied": str(apart)} if apart else {}
        values |= {"partition": local.cut.partition(";")[0]} if local.cut else {}
        message: Reply = {"arguments": values, "seed": request.seed, "names": _names_taken(local.stages)}
        message["parallel"] = any(stage.parallel is not None for stage in local.stages)
        message["tied"] = kinds_of_ties(local.ties, local.modules)
        message["prefixes"] = prefixes_message(local.modules)
        message["on_meta"] = local.on_meta
        message["own"] = {f"recompute of stage {stage.index}": stage.recompute for stage in local.stages}
        return (resolved, local), message

    (resolved, local), replies = agree(world.control, make, part="stages")
    if any(reply["parallel"] for reply in replies.everywhere):
        # with an exchange, so that no rank leaves a comparison in which its replicas are, as another one has raised
        with world.replicas.raised_by_all(ValueError):  # or a slow one would report another's error, not its own
            agree(world.control, lambda: _compared(local.stages, replies[0]["arguments"], world), part="replicas")
    check_same_kinds([reply["tied"] for reply in replies])
    request.programs.parallel = any(reply["parallel"] for reply in replies)
    _set_later([*local.stages, *local.audited.values()], [reply["names"] for reply in replies])
    ties = named_as_held(local.ties, prefixes_of(reply["prefixes"] for reply in replies))
    return resolved, replace(local, ties=ties, on_meta=any(reply["on_meta"] for reply in replies))


def _check_groups(stages: Sequence[Stage]) -> None:
    for stage in stages:
        if stage.parallel is not None and (lost := stage.parallel.lost()):
            raise _broken(f"the process group of the replicas of stage {stage.index}", stage.parallel.broken[lost[0]])


def _compared(stages: Sequence[Stage], arguments: Mapping[str, str], world: World) -> tuple[None, Reply]:
    compare_replicas(stages, arguments, world)
    return None, {"arguments": {}, "seed": None}


def compare_replicas(stages: Sequence[Stage], arguments: Mapping[str, str], world: World) -> None:
    """Refuse replicas that build other pipelines: their collectives would not match. Collective over the replicas.

    Args:
        arguments: text by argument, the same on all ranks of this pipeline.

    Raises:
        ValueError: if a replica has other arguments.
        FailureError: if a replica exits, or does not come within the timeout.
    """
    compared: set[Any] = set()
    for stage in stages:
        if (parallel := stage.parallel) is None or (groups := tuple(parallel.groups)) in compared:
            continue
        compared.add(groups)
        compare = partial(same_text, f"{stage.index} {sorted(arguments.items())}", groups, parallel.device)
        with lost_named(f"of the replicas of stage {stage.index}, ", partial(others_in, groups)):
            same = attended(compare, world.lost, world.member.limit)
        if not same:
            here = ", ".join(
                f"{name} = {arguments[name]}"
                for name in ("schedule", "num_microbatches", "partition", "loss_reduction", "metrics", "split")
                if name in arguments
            )
            raise ValueError(
                f"the replicas of stage {stage.index}, in the processes {parallel.processes()}, do not build the same "
                f"pipeline, here {here}, or are other stages there: their collectives would not match; pass the same "
                "arguments in all replicas, and let each group have the same rank of all pipelines"
            )


def _names_taken(stages: Sequence[Stage]) -> dict[str, list[str] | None]:
    """The carried values that each stage takes; None for any."""
    return {str(stage.index): None if stage.takes is None else sorted(stage.takes) for stage in stages}


def _set_later(stages: Sequence[Stage], messages: Sequence[Mapping[str, list[str] | None]]) -> None:
    for stage in stages:
        stage.later = names_later(messages, stage.index)


def _audits(arguments: Arguments, schedule: Schedule, world: World) -> bool:
    """Whether steps are audited; logs a warning if they should be, and the device does not compute equal bits."""
    share = arguments.execution.audit
    if share is None:
        return False
    check_audit(share, schedule.placement, world.member.size, arguments.model.stages)
    if reason := why_not_reproducible(world.device):
        logger.warning("audit = %s: %s; nothing is audited", share, reason)
    return not reason


def connect(arguments: Arguments, world: World) -> Transport:
    """Create the transport between the ranks. Collective."""
    execution = arguments.execution
    if isinstance(execution.transport, Transport):
        return execution.transport
    if world.is_single_process:
        return Loopback()
    return select_transport(
        execution.chosen_transport,
        exchange=world.control.exchange,
        member=replace(world.member, lost=world.control.lost),
        num_sharing=world.ranks_per_host.count() if world.cores.own is None else 1,
        by_python=world.executor is not NativeExecutor,
    )


def make_steps(
    arguments: Arguments, request: BuildRequest, local: LocalStages, world: World, transport: Transport
) -> Steps:
    """What runs the steps of stages and programs over a transport. Collective."""
    execution = arguments.execution
    copies = _make_copies(request.schedule.placement, local, world, transport)
    audit = None
    if local.audited:
        assert execution.audit is not None
        audit = Audit(execution.audit, local.audited, transport.exchange, world.control, world.device)
    ranks = _make_ranks(execution, local, world, transport, copies, audit)
    random = RandomNumbers(
        world.device,
        seed=request.seed,
        threads=len(local.by_rank) > 1,
        pairs=ranks.pairs != IN_ORDER,
        runtime=native.load() if world.executor is NativeExecutor else None,
    )
    steps = Steps(
        arguments.batch,
        world.cores,
        request.programs,
        ranks,
        world.control,
        copies,
        random,
        Unfilled(local.modules, world.device, local.ties) if local.on_meta else None,
        local.rest,
        warn_after=execution.checked_warn_after(),
        audit=audit,
    )
    # a barrier: no rank waits in a step for one whose construction failed
    world.control.exchange("joining", {})
    return steps


def _make_copies(placement: Placement, local: LocalStages, world: World, transport: Transport) -> StageCopies:
    """What keeps tied weights and the two copies of a stage equal, after it has made them so. Collective."""
    exchange = None if world.is_single_process else transport.exchange
    if exchange is not None and (local.audited or between_ranks(local.ties, placement)):
        transport.prepare_exchange()
    held = {rank: {i: stage.module for i, stage in stages.items()} for rank, stages in local.by_rank.items()}
    inner = partial(make_copies, placement, held, exchange)
    copies = make_tied(local.ties, local.modules, placement, world.member.rank, exchange, inner)
    if not local.on_meta:
        copies.equalise()
    return copies


def _make_ranks(
    execution: ExecutionArguments,
    local: LocalStages,
    world: World,
    transport: Transport,
    copies: StageCopies,
    audit: Audit | None,
) -> LocalRanks:
    """What runs the programs of this process's ranks."""
    device, dimensions = world.device, list(execution.other_dimensions())
    streams = wants_streams(device, execution.overlap, local.by_rank.values())
    cores = len(os.sched_getaffinity(0))
    num_here = world.ranks_per_host.count()
    by_python = world.executor is not NativeExecutor
    pairs, why_pairs = pair_policy(execution.overlap, num_here, cores, device, streams, dimensions, by_python)
    refusal = why_not(device, local.by_rank, transport, copies)
    if execution.cuda_graph and refusal:
        logger.warning("cuda_graph: %s; steps run without CUDA graphs", refusal)
    in_mesh = dimensions if world.control.pipeline else []
    mesh_groups = MeshGroups({name: execution.mesh.get_group(name) for name in in_mesh}, device)
    return (RecordedRanks if execution.cuda_graph and not refusal else LocalRanks)(
        stages=local.by_rank,
        executor=world.executor,
        transport=transport,
        timeout=world.member.timeout,
        publish=world.control.publish,
        pairs=pairs,
        why_pairs=why_pairs,
        device=device,
        several_streams=streams,
        why_not_recorded=refusal,
        mesh_groups=mesh_groups,
        wait_at=longest_wait,
        while_waiting=None if audit is None else audit.while_waiting,
    )
