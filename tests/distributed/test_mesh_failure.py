"""Meshes whose stages meet in collectives: a failure of one rank reaches all, with its place, and nobody waits."""

import os
import signal
import time
from datetime import timedelta
from functools import partial
from typing import Any, NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from fastpipe import Pipeline, StepError
from fastpipe.runtime.common import torch_private
from fastpipe.runtime.transport import MeshGroups
from fastpipe.testing import Fault
from tests.conftest import skip_without_native
from tests.distributed.ranks import on_ranks, ranks
from tests.distributed.test_mesh import LAYERS, MICROBATCHES, WIDTH, Mlp, batch, layers, layers_of
from tests.patience import PATIENCE

FORWARD, BACKWARD, KILL = "forward", "backward", "kill"
AT_CALL = 6  # the third microbatch of the second step


def failing(way: str, layers: list[nn.Module], at_call: int = AT_CALL) -> list[nn.Module]:
    """The layers, every other of which fails in one of its forwards, or of its backwards."""

    def error() -> Any:
        return (lambda _: os.kill(os.getpid(), signal.SIGKILL)) if way == KILL else ArithmeticError("a wrong number")

    return [
        Fault(layer, at_call, error(), backward=way == BACKWARD) if i % 2 else layer for i, layer in enumerate(layers)
    ]


def told(pipe: Pipeline) -> tuple[StepError, str]:
    """The error of the step that fails, the second, and of the next one."""
    x, y = batch(0)
    pipe.step(x, target=y)
    errors = []
    for _ in range(2):
        with pytest.raises(StepError) as raised:
            pipe.step(x, target=y)
        errors.append(raised.value)
    return errors[0], str(errors[1])


def goes_on(schedule: str) -> None:
    """In the same processes, on a mesh that torch does not take for the one that has ended."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tensor"))
    torch.manual_seed(0)
    made = [Mlp() for _ in range(LAYERS)]
    for layer in made:
        parallelize_module(layer, mesh["tensor"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    pipe = Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    x, y = batch(0)
    loss = pipe.step(x, target=y).loss
    assert loss is not None and bool(loss > 0)


def fails(way: str, schedule: str, executor: str, victim: int, num_ranks: int = 2) -> dict[str, Any]:
    mesh = dist.init_device_mesh("cpu", (num_ranks, 2), mesh_dim_names=("pp", "tp"))
    made = layers(mesh)
    if dist.get_rank() == victim:
        made = failing(way, made)
    elif way == FORWARD and dist.get_rank() % 2 == victim % 2:
        made[1] = Fault(made[1], AT_CALL + 1, lambda _: time.sleep(1))  # no message comes while the victim drains
    pipe = Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    error, again = told(pipe)
    found = {"rank": error.rank, "stage": error.stage, "action": error.action, "microbatch": error.microbatch}
    found |= {"text": str(error), "again": again, "cause": repr(error.__cause__)}
    found["notes"] = "\n".join(getattr(error, "__notes__", ()))
    # the mesh's groups are over, the others are not
    if way != KILL and num_ranks > 1:  # otherwise it is that of all processes
        with pytest.raises(RuntimeError, match="backend"):
            dist.all_reduce(torch.ones(2), group=mesh.get_group("tp"))
        dist.barrier()
        for again in (mesh, dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))):
            with pytest.raises(ValueError, match="its groups over tp have ended.* these dimensions have other names"):
                Pipeline([nn.Linear(2, 2)], schedule, MICROBATCHES, mesh=again)
        goes_on(schedule)
    return found


@pytest.mark.parametrize(
    ("way", "schedule", "executor", "victim"),
    [
        (FORWARD, "1f1b", "native", 3),
        (FORWARD, "zbv", "python", 0),
        (BACKWARD, "1f1b", "python", 1),
        (BACKWARD, "zbv", "native", 2),
    ],
)
def test_an_exception_reaches_all_ranks_of_the_mesh(way: str, schedule: str, executor: str, victim: int) -> None:
    skip_without_native()
    with ranks(4) as group:
        answers = group.run(fails, way, schedule, executor, victim)
    kind = "F" if way == FORWARD else "B" if schedule == "1f1b" else "I"
    place = answers[victim]
    for answer in answers:
        assert answer["rank"] == victim // 2 and answer["stage"] is not None
        assert kind in answer["action"] and answer["microbatch"] is not None
        assert f"rank {victim // 2} of the pipeline at tp={victim % 2}, stage" in answer["text"]
        assert "ArithmeticError: a wrong number" in answer["text"] and "start the processes again" in answer["text"]
        assert answer["text"] == answer["again"] == place["text"]
        places = [f"\nrank {r} of the pipeline at tp={t} " for r in range(2) for t in range(2)]
        assert "when the pipeline ended" in answer["notes"] and all(place in answer["notes"] for place in places)
    assert "ArithmeticError" in place["cause"]


def is_interrupted(executor: str, victim: int) -> tuple[str, str]:
    """Runs on every rank: one gets a SIGINT, and its peer comes to the next forward's collective."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    made = layers(mesh)
    if dist.get_rank() == victim:
        i = 0 if victim < 2 else -1  # of its stage
        made[i] = Fault(made[i], 1, lambda _: os.kill(os.getpid(), signal.SIGINT))
    pipe = Pipeline(made, "1f1b", 12, nn.functional.mse_loss, mesh=mesh, executor=executor, timeout=20.0)
    x = torch.ones(12, WIDTH)
    try:
        pipe.step(x, target=x)
    except BaseException as error:  # KeyboardInterrupt, too
        return type(error).__name__, str(error)
    return "", ""


@pytest.mark.parametrize(("executor", "victim"), [("native", 3), ("python", 0)])
def test_an_interrupt_reaches_all_ranks_of_the_mesh(executor: str, victim: int) -> None:
    """What its rank drains does not enter the collectives in which its peer waits."""
    skip_without_native()
    with ranks(4) as group:
        for rank, (kind, text) in enumerate(group.run(is_interrupted, executor, victim)):
            if rank == victim:
                assert kind == "KeyboardInterrupt"
            else:
                assert f"rank {victim // 2} of the pipeline at tp={victim % 2}: KeyboardInterrupt" in text, (kind, text)


@pytest.mark.parametrize(("schedule", "executor"), [("1f1b", "native"), ("zbv", "python")])
def test_a_death_reaches_all_ranks_of_the_mesh(schedule: str, executor: str) -> None:
    skip_without_native()
    with ranks(4, environment={"TORCHELASTIC_USE_AGENT_STORE": str(executor == "python")}) as group:
        group.start(fails, KILL, schedule, executor, 3)
        for answer in group.results([0, 1, 2]):
            assert answer["rank"] == 1 and "rank 1 of the pipeline at tp=1: its process died" in answer["text"]
            assert answer["text"] == answer["again"]


def one_stops(dimension: str, victim: int) -> str:
    """Runs on every rank of a mesh whose groups have torch's timeout of half an hour; one stops in its second step."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", dimension))
    made = layers(mesh) if dimension == "tp" else [fully_shard(Mlp(), mesh=mesh[dimension]) for _ in range(LAYERS)]
    if dist.get_rank() == victim:
        stop = partial(os.kill, os.getpid(), signal.SIGSTOP)
        made = [Fault(layer, AT_CALL, lambda _: stop(), backward=True) for layer in made]
    pipe = Pipeline(made, "zbv", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=10)
    x, y = batch(0)
    pipe.step(x, target=y)
    # the script's own collectives wait as long as before
    backend = torch_private.backend_for(mesh.get_group(dimension), torch.device("cpu"))
    assert backend.options._timeout == timedelta(minutes=30)
    del backend
    with pytest.raises((StepError, RuntimeError)) as raised:
        pipe.step(x, target=y)
    with pytest.raises(StepError, match="closed"):
        pipe.step(x, target=y)
    return str(raised.value)


@pytest.mark.parametrize(("dimension", "victim"), [("tp", 1), ("dp_shard", 2)])
def test_nobody_waits_in_a_collective_for_a_rank_that_is_stopped(dimension: str, victim: int) -> None:
    """Which closes no connection, unlike one that raises or is killed."""
    with ranks(4) as group:
        group.start(one_stops, dimension, victim)
        for text in group.results([rank for rank in range(4) if rank != victim], timeout=120):
            assert "failed on" in text and "closed" in text


def one_leaves_out_a_step() -> str:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=10)
    if dist.get_rank() == 3:
        dist.barrier()  # until the others have given up
        return ""
    x, y = batch(0)
    with pytest.raises(StepError) as raised:
        pipe.step(x, target=y)
    dist.barrier()
    return str(raised.value)


def test_a_rank_that_leaves_out_a_step_is_named_by_its_place() -> None:
    with ranks(4) as group:
        for text in group.run(one_leaves_out_a_step)[:3]:
            assert "rank 1 of the pipeline at tp=1 did not reach the start of call 1" in text


@pytest.mark.parametrize(("way", "executor"), [(FORWARD, "python"), (BACKWARD, "native"), (KILL, "native")])
def test_a_failure_reaches_the_peer_of_a_pipeline_of_one_rank(way: str, executor: str) -> None:
    skip_without_native()
    with ranks(2) as group:
        group.start(fails, way, "1f1b", executor, 1, 1)
        for answer in group.results([0] if way == KILL else [0, 1]):
            said = "its process died" if way == KILL else "a wrong number"
            assert "rank 0 of the pipeline at tp=1" in answer["text"] and said in answer["text"]
            assert answer["text"] == answer["again"]


@on_ranks(2)
def test_pipelines_of_one_rank_compare_their_batches() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=PATIENCE)
    (x, y), (other, _) = batch(0), batch(1)
    with pytest.raises(ValueError, match="the input has other values"):
        pipe.step((x, other)[dist.get_rank()], target=y)
    assert pipe.step(x, target=y).loss is not None


def exits_at_the_start() -> str:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=PATIENCE)
    x, y = batch(0)

    def exchange(*_: Any) -> NoReturn:
        raise SystemExit("terminated")  # as a signal's handler does

    if dist.get_rank() == 1:
        pipe._steps.control.exchange = exchange
    with pytest.raises((SystemExit, StepError)) as raised:
        pipe.step(x, target=y)
    return f"{raised.type.__name__}: {raised.value}"


def test_an_exit_at_the_start_reaches_the_peer_of_a_pipeline_of_one_rank() -> None:
    """Its process lives on, so that nothing but its report ends the wait."""
    with ranks(2) as group:
        peer, own = group.run(exits_at_the_start)
    assert own == "SystemExit: terminated"
    assert peer.startswith("StepError") and "at tp=1" in peer and "SystemExit: terminated" in peer


@on_ranks(2)
def test_threads_share_no_groups_of_a_mesh() -> None:
    mesh = dist.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "tp"))
    with pytest.raises(ValueError, match="num_ranks = 2: ranks that are threads.*collectives of their stages over tp"):
        Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, num_ranks=2)


@on_ranks(4)
def test_input_that_one_pipeline_refuses_is_refused_by_all() -> None:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh)
    x, y = batch(0)
    # one pipeline is given too few rows
    rows = 1 if mesh["tp"].get_local_rank() else None
    with pytest.raises((ValueError, StepError), match="" if rows else "of the pipeline at tp=1 refused its input"):
        pipe.step(x[:rows], target=y[:rows])
    assert pipe.step(x, target=y).loss is not None


def clips_with_fewer(way: str) -> tuple[str, str]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "tp"))
    pipe = Pipeline(layers(mesh), "1f1b", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=10)
    x, y = batch(0)
    pipe.step(x, target=y)
    if dist.get_rank() == 2 and way == KILL:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        pipe.step(x, target=y) if dist.get_rank() == 2 else pipe.clip_grad_norm_(1.0)
    except Exception as error:
        return type(error).__name__, str(error)
    raise AssertionError("it should have failed")


@pytest.mark.parametrize("way", [KILL, "another call"])
def test_a_norm_over_the_mesh_that_a_rank_does_not_join(way: str) -> None:
    """Its peer waits in a collective, which ends with an error that tells nothing."""
    skip_without_native()
    living = [rank for rank in range(4) if way != KILL or rank != 2]
    with ranks(4) as group:
        group.start(clips_with_fewer, way)
        for kind, text in group.results(living):
            if way == KILL:
                assert kind == "StepError" and " of the pipeline at tp=" in text, (kind, text)
            else:  # the peer gives up before the others or after
                says = ("make the same call", "clip_grad_norm_ on every rank", " of the pipeline at tp=")
                assert kind != "RuntimeError" and any(part in text for part in says), (kind, text)


def fails_beside_replicas(
    way: str, schedule: str, victim: int, dims: tuple[str, ...], at_call: int = AT_CALL
) -> tuple[str, str]:
    mesh = dist.init_device_mesh("cpu", (2, 2, 2) if len(dims) == 3 else (2, 4), mesh_dim_names=dims)
    kind = next((name for name in dims if name in ("tp", "cp", "ep")), "")
    made: list[nn.Module] = layers_of(kind, mesh) if kind else [Mlp() for _ in range(LAYERS)]
    if not at_call:  # fails behind the collective of a stage, whose peer goes on to the next stage
        made = [part for layer in made for part in (layer, Mlp())]
    shards = mesh[tuple(name for name in dims if name.startswith("dp") or name == "cp")]
    made = [fully_shard(layer, mesh=shards) for layer in made]
    if dist.get_rank() == victim:
        made = failing(way, made, at_call)
    pipe = Pipeline(made, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, timeout=PATIENCE)
    groups = pipe._steps.ranks.mesh_groups
    if dist.get_rank() == (victim + 4) % 8:  # its watcher is slower than the messages of its pipeline
        groups.abort = lambda: (time.sleep(0.5), MeshGroups.abort(groups))
    x, y = batch(mesh["dp_shard"].get_local_rank())
    texts = []
    for _ in range(at_call // MICROBATCHES):
        pipe.step(x, target=y)
    for _ in range(2 if kind else 1):
        with pytest.raises((StepError, ArithmeticError, RuntimeError)) as raised:
            pipe.step(x, target=y)
        texts.append(str(raised.value))
    return texts[0], texts[-1]


@pytest.mark.parametrize(
    ("way", "schedule", "kind"),
    [
        (FORWARD, "1f1b", "cp"),
        (BACKWARD, "zbv", "cp"),
        (KILL, "1f1b", "tp"),
        (BACKWARD, "dualpipev", "ep"),
    ],
)
def test_a_failure_reaches_the_replicas_of_the_mesh(way: str, schedule: str, kind: str) -> None:
    """Of cp, stages and the wrapper use one group, which ends, also if another stage of the rank is still to reduce in
    it; the wrapper's other one does not."""
    skip_without_native()
    victim = 6  # the second of two ranks, tp=1 or cp=1, of the first replica
    with ranks(8) as group:
        group.start(fails_beside_replicas, way, schedule, victim, ("pp", kind, "dp_shard"))
        living = [rank for rank in range(8) if way != KILL or rank != victim]
        for rank, (text, again) in zip(living, group.results(living), strict=True):
            assert text == again
            if rank % 2 == 0:
                assert f"rank 1 of the pipeline at {kind}=1" in text
                assert ("its process died" if way == KILL else "a wrong number") in text
            elif way != KILL:
                assert "REDUCE_GRAD: the step failed in another of the replicas" in text
                assert f"rank 1 of the pipeline at {kind}=1, stage " in text and "a wrong number" in text, text
            else:
                assert "REDUCE_GRAD" in text, text


@pytest.mark.parametrize(("schedule", "at_call", "victim"), [("1f1b", AT_CALL, 6), ("zbv", 0, 6), ("zbv", 0, 2)])
def test_a_failure_ends_the_dimension_over_which_stages_are_sharded(schedule: str, at_call: int, victim: int) -> None:
    """The wrapper reduces over cp first, which has ended, and replicas in the other dimension wait for its average. In
    the first forward of the first step the layer's gathered parameters have not been used."""
    skip_without_native()
    with ranks(8) as group:
        answers = group.run(fails_beside_replicas, FORWARD, schedule, victim, ("pp", "dp_shard", "cp"), at_call)
        rank = victim // 4  # at cp=0 of the second replica; its first stage, which fails, has the same number
        place = f"rank {rank} of the pipeline at cp=0, stage {rank}, action {rank}F{at_call % MICROBATCHES}"
        for rank, (text, again) in enumerate(answers):
            assert text == again and place in text, text
            assert ("REDUCE_GRAD: the step failed in another of the replicas" in text) == (rank % 4 < 2), text


@pytest.mark.parametrize(
    ("dims", "neighbours"),
    [(("pp", "dp_replicate", "dp_shard"), (0, 3, 4, 7)), (("pp", "dp_shard"), (0, 1, 3, 4, 5, 7))],
)
def test_a_death_reaches_all_replicas(dims: tuple[str, ...], neighbours: tuple[int, ...]) -> None:
    """Some wait in a ring for a replica that has noticed, others in the other dimension for one that has failed."""
    skip_without_native()
    victim, living = 6, [0, 1, 2, 3, 4, 5, 7]
    with ranks(8) as group:
        group.start(fails_beside_replicas, KILL, "zbv", victim, dims)
        for rank, (text, _) in zip(living, group.results(living), strict=True):
            assert "the pipeline is closed" in text, (rank, text)
            if rank == 2:
                assert "rank 1: its process died" in text, text
            elif rank in neighbours:
                says = "process 6 has exited" if len(dims) == 3 else "one of the processes ["
                assert "REDUCE_GRAD: of the replicas of stage " in text and says in text, (rank, text)
            else:
                assert "REDUCE_GRAD: the step failed in another of the replicas" in text, (rank, text)
