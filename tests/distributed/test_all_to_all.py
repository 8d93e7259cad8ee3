"""`fastpipe.all_to_all`: a collective with a backward, during which the other half of a pair computes."""

import os
import signal
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import checkpoint

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.common import torch_private
from fastpipe.runtime.stage.pairs import num_calls
from fastpipe.testing import reference_step
from tests.conftest import BOTH, skip_without_native
from tests.distributed.ranks import GroupOf, on_ranks, ranks
from tests.distributed.test_mesh import WIDTH, Experts, batch
from tests.distributed.test_mesh_failure import BACKWARD, FORWARD, KILL, told

MICROBATCHES = 6


@on_ranks(4)
def test_the_values_of_torchs() -> None:
    """The values and gradients, also where a rank sends or gets no rows."""
    rank, size = dist.get_rank(), dist.get_world_size()
    counts = torch.randint(3, (size, size), generator=torch.Generator().manual_seed(0))
    sent, received = counts[rank].tolist(), counts[:, rank].tolist()
    rows = torch.randn(sum(sent), 2, dtype=torch.double).t().contiguous().t().requires_grad_()
    mine = fastpipe.all_to_all(rows, received, sent)
    theirs = all_to_all_single_autograd(rows.contiguous(), received, sent, dist.group.WORLD)
    assert torch.equal(mine, theirs)
    factor = torch.randn_like(mine)
    assert torch.equal(*(torch.autograd.grad((found * factor).sum(), rows)[0] for found in (mine, theirs)))
    assert fastpipe.all_to_all(torch.full((size,), rank)).tolist() == list(range(size))


class Noted(Experts):
    """An expert per rank; notes what it computes."""

    def __init__(self, mesh: DeviceMesh, events: list[str]) -> None:
        super().__init__(mesh)
        self.events = events

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        self.events.append(f"compute {action()}")
        found = super().expert(rows)
        found.register_hook(lambda grad: self.events.append(f"compute {action()}"))
        return found


def action() -> str:
    found = fastpipe.current()
    return "" if found is None else f"{found.stage}{found.action}{found.microbatch}"


def note_exchanges(events: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Note when an all-to-all starts and when it is waited for."""
    start = dist.all_to_all_single

    class Work:
        def __init__(self, work: Any) -> None:
            self.work = work

        def wait(self) -> None:
            events.append(f"wait {action()}")
            self.work.wait()

    def all_to_all_single(*args: Any, async_op: bool = False, **kwargs: Any) -> Any:
        if not async_op:
            return start(*args, **kwargs)
        events.append(f"start {action()}")
        return Work(start(*args, async_op=True, **kwargs))

    monkeypatch.setattr(dist, "all_to_all_single", all_to_all_single)


def mesh_of() -> DeviceMesh:
    return dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "ep"))


def made(mesh: DeviceMesh, events: list[str], count: int, wrap: Callable[[nn.Module], nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [wrap(Noted(mesh["ep"], events)) for _ in range(count)]


def trains(
    schedule: str, executor: str, wrap: Callable[[nn.Module], nn.Module] = lambda layer: layer, **options: Any
) -> tuple[list[str], Any, str]:
    """Steps against the unsplit model on the same mesh: events of the last one, counts of pairs, the description."""
    mesh, events, none = mesh_of(), [], []
    layers = made(mesh, events, 4, wrap)
    pipe = Pipeline(
        layers, schedule, MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor, timeout=60, **options
    )
    unsplit = nn.Sequential(*made(mesh, none, 4, wrap))
    with pytest.MonkeyPatch.context() as monkeypatch:
        for step in range(2):  # in the first one pairs go in order
            x, y = batch(step)
            note_exchanges(none, monkeypatch)
            expected = reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss)
            monkeypatch.undo()
            note_exchanges(events, monkeypatch)
            events.clear()
            assert torch.equal(pipe.step(x, target=y).loss, expected.loss)
            monkeypatch.undo()
    gradients = {name: parameter.grad for name, parameter in unsplit.named_parameters()}
    for name, parameter in pipe.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
    return events, pipe._steps.ranks.pair_counts(), pipe.describe()


def between(events: list[str]) -> dict[str, list[str]]:
    """What was computed while rows travelled, by the kind of action that waited for them."""
    found: dict[str, list[str]] = defaultdict(list)
    for start, event in enumerate(events):
        if event.startswith("start"):
            name = event.removeprefix("start ")
            end = events.index(f"wait {name}", start)
            found[name[1]] += [other for other in events[start:end] if other.startswith("compute")]
    return found


@BOTH
@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved_overlap"])
def test_rows_travel_while_the_other_half_computes(group_of: GroupOf, schedule: str, executor: str) -> None:
    answers = group_of(4).run(trains, schedule, executor)
    for events, counts, text in answers:
        assert counts["in turns"] > 0 and counts["together"] == 0, counts
        found = between(events)
        assert any("B" in event for event in found["F"]) and any("F" in event for event in found["B"])
        assert "in turns (at fastpipe.all_to_all; collectives over ep must have one order" in text
        assert f", {counts['in turns']} in turns" in text
    # the order of collectives is the same on the ranks of a group
    starts = [[event for event in events if event.startswith("start")] for events, _, _ in answers]
    assert starts[0] == starts[1] and starts[2] == starts[3]


def test_never_means_in_order(group_of: GroupOf, executor: str) -> None:
    for events, counts, text in group_of(4).run(trains, "dualpipev", executor, overlap="never"):
        assert counts["in turns"] == 0 and counts["in order"] > 0
        assert not any(between(events).values())
        assert "in order (overlap='never')" in text


class Recomputed(nn.Module):
    """A layer in a checkpoint, whose all-to-alls the backward runs again."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.layer, x, use_reentrant=False)
        return out


def test_recomputed_layers_take_turns(group_of: GroupOf, executor: str) -> None:
    for _, counts, _ in group_of(4).run(trains, "dualpipev", executor, Recomputed):
        assert counts["in turns"] > 0


class Uneven(nn.Module):
    """Draws random numbers on one rank only, and recomputes."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = Recomputed(layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.get_rank() == 0:
            torch.rand(1)
        return self.layer(x)


def test_all_ranks_run_pairs_alike(group_of: GroupOf, executor: str) -> None:
    """One of them must run its pairs in order, so all do."""
    answers = group_of(4).run(trains, "dualpipev", executor, Uneven)
    assert [counts["in turns"] for _, counts, _ in answers] == [0] * 4
    assert "in order: all, as stages" in answers[0][2]


class Dense(nn.Module):
    """Without experts."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.events = events

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.events.append(f"compute {action()}")
        found: torch.Tensor = x + self.linear(x)
        found.register_hook(lambda grad: self.events.append(f"compute {action()}"))
        return found


@on_ranks(4)
def test_the_half_with_experts_begins(executor: str) -> None:
    """Where only one stage of a pair has experts, the other one computes while their rows travel."""
    mesh, events = mesh_of(), []
    torch.manual_seed(0)
    layers = [Dense(events), Dense(events), Noted(mesh["ep"], events), Noted(mesh["ep"], events)]
    pipe = Pipeline(layers, "dualpipev", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    with pytest.MonkeyPatch.context() as monkeypatch:
        note_exchanges(events, monkeypatch)
        for step in range(2):
            events.clear()
            pipe.step(batch(step)[0], target=batch(step)[1])
    found = between(events)
    assert found["F"] and found["B"], found


class Failing(Noted):
    """Fails between two all-to-alls of a half that runs in turns."""

    def __init__(self, mesh: DeviceMesh, way: str) -> None:
        super().__init__(mesh, [])
        self.way = way

    def expert(self, rows: torch.Tensor) -> torch.Tensor:
        if self.way in (FORWARD, KILL):
            self.fail()
        found = super().expert(rows)
        if self.way == BACKWARD:
            found.register_hook(lambda grad: self.fail())
        return found

    def fail(self) -> None:
        if torch_private.find_in_thread("fastpipe.turns") is None:
            return
        if self.way == KILL:
            os.kill(os.getpid(), signal.SIGKILL)
        raise ArithmeticError("wrong")


def fails(way: str, executor: str, victim: int) -> str:
    mesh = mesh_of()
    torch.manual_seed(0)
    layers = [Failing(mesh["ep"], way if dist.get_rank() == victim else "") for _ in range(4)]
    pipe = Pipeline(layers, "dualpipev", MICROBATCHES, nn.functional.mse_loss, mesh=mesh, executor=executor)
    return str(told(pipe)[0])


@BOTH
@pytest.mark.parametrize("way", [FORWARD, BACKWARD, KILL])
def test_a_failing_half_releases_the_other_one(way: str, executor: str) -> None:
    """On its rank, which raises the error of the half that failed, with its place, and on all others."""
    skip_without_native()
    victim = 3
    with ranks(4) as group:
        group.start(fails, way, executor, victim)
        living = [rank for rank in range(4) if way != KILL or rank != victim]
        for error in group.results(living):
            assert "rank 1 of the pipeline at ep=1" in error, error
            place = {FORWARD: "stage 2, action (2F2;1B0)OVERLAP_F_B, microbatch 2", KILL: ""}
            assert place.get(way, "stage 1, action (2F2;1B0)OVERLAP_F_B, microbatch 0") in error
            assert ("its process died" if way == KILL else "ArithmeticError: wrong") in error


@on_ranks(2)
def test_compiled_layers_call_it() -> None:
    torch.manual_seed(dist.get_rank())
    linear, x = nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)

    def layer(x: torch.Tensor) -> torch.Tensor:
        return fastpipe.all_to_all(linear(x).sin()).cos()

    expected = torch.autograd.grad(layer(x).sum(), x)[0]
    before = num_calls()
    found = torch.compile(layer, backend="eager")(x)
    assert num_calls() == before + 1, "it is not traced"
    assert torch.equal(torch.autograd.grad(found.sum(), x)[0], expected)
