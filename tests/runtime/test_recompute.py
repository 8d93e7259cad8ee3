"""Stages that recompute: the bits of those that do not, one recompute a microbatch, the memory that is predicted."""

import itertools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

from fastpipe import CostModel, Pipeline, check_parity, simulate
from fastpipe.runtime.model.chain import recomputed
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn, overlap_of, skip_without_native
from tests.runtime.checks import assert_same, rows_for, same_bits, train_and_compare, unequal
from tests.runtime.models import CASES, WIDTH, Block, Case, squared
from tests.runtime.paired import PAIRED, Own
from tests.runtime.test_losses import TWO, whole


@executors_in_turn("schedule, num_ranks, num_microbatches", TWO)
def test_schedules_of_each_kind(schedule: str, num_ranks: int, num_microbatches: int, executor: str) -> None:
    options = {"num_ranks": num_ranks, "executor": executor, "recompute": "full", "steps": 2}
    train_and_compare("added_losses", schedule, num_microbatches, **options)


@pytest.mark.parametrize(
    ("case", "way", "executor"),
    [(case, *way) for case, way in zip(CASES, itertools.cycle([("full", "native"), ("layers", "python")]))],
    indirect=["executor"],
)
def test_every_boundary(case: str, way: str, executor: str) -> None:
    options = {"num_ranks": 2, "num_layers": 9, "executor": executor, "recompute": way}
    if case != "in_place":
        train_and_compare(case, "dualpipev", 5, **options)
        return
    with pytest.raises(ValueError, match="changes an input in place.*recompute='none'"):
        train_and_compare(case, "dualpipev", 5, **options)


class InPlace(nn.Module):
    """Changes in place a tensor within a dict, or a keyword argument."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor | dict[str, torch.Tensor], *, scale: torch.Tensor | None = None) -> torch.Tensor:
        if isinstance(x, dict):
            return self.linear(x["hidden"].add_(1))
        return self.linear(x if scale is None else x * scale.add_(1))


class InDict(nn.Linear):
    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:  # type: ignore[override]
        return {"hidden": super().forward(x)}


@executors_in_turn("way, named", itertools.product(["full", "layers"], [False, True]))
def test_changes_in_place_that_torch_does_not_notice(way: str, named: bool, executor: str) -> None:
    layers = [nn.Linear(WIDTH, WIDTH) if named else InDict(WIDTH, WIDTH), InPlace()]
    pipe = Pipeline(layers, "1f1b", 2, squared, num_ranks=2, recompute=way, executor=executor)
    named_inputs = {"scale": torch.ones(4, WIDTH)} if named else {}
    with pytest.raises(ValueError, match="forward of .* changes an input in place"):
        pipe.step(torch.randn(4, WIDTH), target=torch.randn(4, WIDTH), **named_inputs)


@executors_in_turn("schedule, way", itertools.product(PAIRED, ["full", "layers"]))
def test_pairs(schedule: str, way: str, executor: str) -> None:
    options = {"num_ranks": 2, "executor": executor, "overlap": overlap_of(executor), "recompute": way}
    train_and_compare("plain", schedule, 8, num_layers=8, **options)


class Counted(nn.Module):
    """Counts its forwards, and how many of its inner activations are alive at most."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.all = SimpleNamespace(calls=0, most=0, made=[])  # a recompute restores attributes of the layer itself

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.all.calls += 1
        hidden = torch.tanh(self.first(x))
        self.all.made = [it for it in self.all.made if not it.expired()] + [StorageWeakRef(hidden.untyped_storage())]
        self.all.most = max(self.all.most, len(self.all.made))
        return torch.tanh(self.second(hidden))


COUNTED = Case(lambda n: [Counted() for _ in range(n)])


@executors_in_turn(
    "schedule, way", itertools.product(["1f1b", "zb_h1", "zbv", "dualpipev", "dualpipe"], ["full", "layers", "none"])
)
def test_one_recompute_a_microbatch(way: str, schedule: str, executor: str) -> None:
    pipe = Pipeline(COUNTED.layers(8), schedule, 8, squared, num_ranks=2, executor=executor, recompute=way)
    batch = COUNTED.batches(1, 16)[0]
    for _ in range(2):
        pipe.step(*batch.args, target=batch.target)
    pipe.eval_step(*batch.args)
    layers = [m for stage in pipe._steps.stages for m in stage.module.modules() if isinstance(m, Counted)]
    microbatches = 4 if schedule == "dualpipe" else 8  # of a holder
    assert {layer.all.calls for layer in layers} == {microbatches * (2 * (1 if way == "none" else 2) + 1)}


@executors_in_turn("schedule, reentrant", itertools.product(["1f1b", "zb_h1", "zbv", "dualpipev"], [False, True]))
def test_one_recompute_by_the_layers_own_checkpoint(schedule: str, reentrant: bool, executor: str) -> None:
    class Own(Counted):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = checkpoint(super().forward, x, use_reentrant=reentrant)
            return out

    case = Case(lambda n: [Own() for _ in range(n)], lambda rows: CASES["input_with_gradient"].batch(rows))
    unsplit, batch = whole(case, 8), case.batches(1, 17)[0]
    pipe = Pipeline(case.layers(8), schedule, 8, squared, num_ranks=2, executor=executor)
    result = pipe.step(*batch.args, target=batch.target)
    assert_same(pipe, result, unsplit, reference_step(unsplit, (batch.args, batch.target), pipe.schedule, squared))
    layers = [m for stage in pipe._steps.stages for m in stage.module.modules() if isinstance(m, Own)]
    assert {layer.all.calls for layer in layers} == {2 * 8}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gpipe"])
def test_what_is_held_is_what_the_simulator_predicts(schedule: str, executor: str) -> None:
    """Inner activations of one layer a stage; what passes from stage to stage counts nothing."""
    if schedule == "zb_h1":
        skip_without_native()  # nothing waits for W
    cost = CostModel(stage_bytes=1, forward=2)
    batch = COUNTED.batches(1, 16)[0]
    found = {}
    for way, recompute in (("none", 0), ("full", 1)):
        pipe = Pipeline(COUNTED.layers(4), schedule, 8, squared, num_ranks=4, executor=executor, recompute=way)
        pipe.step(*batch.args, target=batch.target)
        predicted = simulate(pipe.schedule, replace(cost, recompute=recompute))
        held = [next(pipe.stage_modules[stage].children()).all.most for stage in range(4)]
        # a forward in progress holds its own for a moment
        assert held == [max(1, round(count)) for count in predicted.peak_bytes], way
        found[way] = held
    assert sum(found["full"]) < sum(found["none"])


def test_a_policy_is_asked_for_every_stage(executor: str) -> None:
    asked = []

    def policy(stage: int, module: nn.Module) -> str:
        asked.append((stage, len(list(module.children()))))
        return ("none", "full", "layers", "full")[stage]

    pipe = Pipeline(COUNTED.layers(8), "1f1b", 4, squared, num_ranks=4, executor=executor, recompute=policy)
    assert sorted(asked) == [(stage, 2) for stage in range(4)]
    batch = COUNTED.batches(1, 16)[0]
    pipe.step(*batch.args, target=batch.target)
    layers = [m for stage in range(4) for m in pipe.stage_modules[stage].children()]
    assert [layer.all.calls for layer in layers] == [4, 4, 8, 8, 8, 8, 8, 8]
    assert "recompute   full: stages 1, 3\nrecompute   layers: stage" in pipe.describe()


class Drops(nn.Module):
    """Draws random numbers, and uses buffers and a number that every forward changes."""

    calls = 1

    def __init__(self) -> None:
        super().__init__()
        self.block, self.norm, self.dropout = Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5)
        self.register_buffer("size", torch.zeros(()))
        self.register_buffer("count", torch.ones(()))
        self.norm.register_buffer("same_count", self.count)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.size = 0.9 * self.size + 0.1 * x.detach().abs().mean()
        self.count += 1
        self.calls, self.output = (
            self.calls + 1,
            self.norm(self.dropout(self.block(x)) * self.count.clone() - self.size),
        )
        return self.output * self.calls / self.norm.same_count.clone()


DROPS = Case(lambda n: [Drops() for _ in range(n)])


def all_drops(pipe: Pipeline) -> list[Drops]:
    return [part for stage in pipe._steps.stages for part in stage.module.modules() if isinstance(part, Drops)]


@executors_in_turn(
    "way, schedule", itertools.product(["full", "layers"], ["1f1b", "zb_h1", "zbv", "dualpipev", "interleaved_zb"])
)
def test_random_numbers_and_buffers_are_those_of_the_forward(schedule: str, way: str, executor: str) -> None:
    options = {"num_ranks": 2, "executor": executor, "rng": "per_microbatch", "overlap": overlap_of(executor)}
    torch.manual_seed(5)
    pipe = Pipeline(DROPS.layers(8), schedule, 4, squared, recompute=way, **options)
    torch.manual_seed(5)
    plain = Pipeline(DROPS.layers(8), schedule, 4, squared, **options)
    unsplit = DROPS.layers(8)
    for step, batch in enumerate(DROPS.batches(3, rows_for(4))):
        results = [p.step(*batch.args, target=batch.target) for p in (pipe, plain)]
        reference_step(
            unsplit, (batch.args, batch.target), pipe.schedule, squared, rng="per_microbatch", seed=5, step_count=step
        )
        assert same_bits(results[0].loss, results[1].loss)
        assert not (wrong := unequal(pipe, Chain(dict(enumerate(unsplit))))), wrong
        for (name, found), expected in zip(
            nn.ModuleDict({str(k): m for k, m in pipe.stage_modules.items()}).named_buffers(),
            nn.ModuleDict({str(k): m for k, m in plain.stage_modules.items()}).buffers(),
            strict=True,
        ):
            assert same_bits(found, expected), name
        for one, other in zip(*map(all_drops, (pipe, plain)), strict=True):
            assert one.calls == other.calls == 1 + 4 * (step + 1)
            assert same_bits(one.output, other.output)


def test_stages_of_ones_own_are_recomputed_as_a_whole(executor: str) -> None:
    unsplit = whole(COUNTED, 4)
    layers = COUNTED.layers(4)
    pipe = Pipeline(lambda s: layers[s], "zb_h1", 4, squared, num_ranks=4, executor=executor, recompute="full")
    batch = COUNTED.batches(1, 16)[0]
    pipe.step(*batch.args, target=batch.target)
    reference_step(unsplit, (batch.args, batch.target), pipe.schedule, squared)
    for layer, other in zip(layers, unsplit.children(), strict=True):
        assert layer.all.calls == 8
        assert all(same_bits(a.grad, b.grad) for a, b in zip(layer.parameters(), other.parameters(), strict=True))


def test_a_method_for_pairs_is_left_alone_where_stages_recompute(executor: str) -> None:
    layers = [Own() for _ in range(4)]
    pipe = Pipeline(layers, "dualpipev", 8, squared, num_ranks=2, executor=executor, recompute="full")
    batch = CASES["plain"].batches(1, 17)[0]
    before = Own.calls
    assert check_parity(pipe, layers, (batch.args, batch.target)).ok
    assert Own.calls == before


class Failing(nn.Module):
    """Raises when it is run again."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.calls: list[None] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(None)
        if len(self.calls) == 5:
            raise OverflowError("again")
        return self.linear(x)


def test_a_recompute_that_fails_is_the_backwards_failure(executor: str) -> None:
    layers = [Failing(), *CASES["plain"].layers(1)]
    pipe = Pipeline(layers, "gpipe", 4, squared, num_ranks=2, executor=executor, recompute="full")
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    with pytest.raises(OverflowError, match="again") as caught:
        pipe.step(x, target=y)
    assert any("0B" in note and "stage 0" in note for note in caught.value.__notes__)
    pipe.step(x, target=y)


def test_a_forward_that_fails_leaves_nothing_in_its_thread() -> None:
    """In torch 2.11 the hooks of its checkpoint stay as long as the exception does."""
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(ZeroDivisionError) as caught:
        recomputed(lambda x: x / (1 // 0), nn.Module(), x)
    x.square().sum().backward()
    assert caught.value and torch.equal(x.grad, 2 * torch.ones(2))


class WithNamesOfTorch(nn.Module):
    """Its keyword arguments are called as those of torch.utils.checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, debug: Any = 1.0, early_stop: Any = 1.0, use_reentrant: Any = 1.0) -> Any:
        return self.linear(x) * debug * early_stop * use_reentrant


@pytest.mark.parametrize("way", ["full", "layers"])
def test_names_of_keyword_arguments_are_the_layers(way: str, executor: str) -> None:
    layers, x, y = [WithNamesOfTorch() for _ in range(2)], torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2, executor=executor, recompute=way)
    names = ("debug", "early_stop", "use_reentrant")
    assert check_parity(pipe, layers, (x, y), kwargs={name: torch.randn(8, 1) for name in names}).ok


def of_jit(compiles: str) -> nn.Module:
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    return torch.jit.script(module) if compiles == "script" else torch.jit.trace(module, torch.ones(2, WIDTH))


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
@pytest.mark.parametrize("compiles", ["script", "trace"])
@pytest.mark.parametrize("way", ["full", "layers"])
def test_modules_of_torch_jit(compiles: str, way: str, executor: str) -> None:
    layers = [of_jit(compiles), Block(), of_jit(compiles)]
    x, y = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    nn.Sequential(*layers)(x[:2])
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=3, executor=executor, recompute=way)
    assert check_parity(pipe, layers, (x, y)).ok


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_a_module_of_torch_jit_that_fails_in_the_recompute() -> None:
    """As in its first step. That this is its first call cannot be said here: torch keeps what it knows of the code."""
    module, calls = of_jit("script"), itertools.count()

    def function(x: torch.Tensor) -> torch.Tensor:
        if next(calls):
            raise RuntimeError("failed in the TorchScript interpreter")
        return module(x)

    output = recomputed(function, module, torch.ones(2, WIDTH, requires_grad=True))
    with pytest.raises(RuntimeError, match="TorchScript interpreter") as caught:
        output.sum().backward()
    assert "call it once before the first step, set recompute='none'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"recompute": "some"}, "recompute = 'some': use 'none', 'full'"),
        ({"recompute": None}, "recompute = None"),
        ({"recompute": lambda stage, module: stage == 0}, "recompute returned True for stage 0: return 'none'"),
        ({"recompute": "layers", "stages": lambda s: Block()}, "stage 0 is one module, a Block, .* use 'full'"),
    ],
)
def test_policies_that_are_none(options: dict[str, Any], text: str) -> None:
    options = {"stages": CASES["plain"].layers(2), **options}
    with pytest.raises(ValueError, match=text):
        Pipeline(schedule="1f1b", num_microbatches=4, loss_fn=squared, num_ranks=2, **options)
