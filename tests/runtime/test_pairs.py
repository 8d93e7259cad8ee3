"""Pairs of a forward and a backward: together, in order, by the modules' own method; the bits are the same."""

import gc
import os
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe import Pipeline
from fastpipe.runtime.pairs import IN_ORDER, MEASURED, NUM_KEPT, NUM_SAMPLES, TOGETHER, PairClock, pair_policy
from fastpipe.runtime.stage import Chain
from fastpipe.testing import Fault, reference_step
from tests.runtime.checks import same_bits, unequal

WIDTH = 6
PAIRED = ["dualpipev", "dualpipe", "1f1b_overlap", "interleaved_overlap"]


class Layer(nn.Module):
    """A layer, with a dropout if asked for, in a checkpoint or not."""

    def __init__(self, p: float = 0.0, recomputes: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(p)
        self.recomputes = recomputes

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.dropout(self.linear(x)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return out


class Own(Layer):
    """As one would write a layer for DualPipe."""

    calls = 0

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: nn.Module,
        inputs0: list[torch.Tensor],
        criterion0: Callable[..., torch.Tensor] | None,
        labels0: list[torch.Tensor],
        module1: nn.Module,
        loss1: torch.Tensor | None,
        outputs1: Sequence[torch.Tensor],
        output_grads1: Sequence[torch.Tensor],
    ) -> Any:
        assert isinstance(inputs0, list) and isinstance(labels0, list) and (criterion0 is None) == (not labels0)
        assert (loss1 is None) == bool(outputs1) and len(outputs1) == len(output_grads1)
        Own.calls += 1
        outputs0 = [module0(*inputs0)]
        loss0 = None if criterion0 is None else criterion0(*outputs0, *labels0)
        if loss1 is not None:
            loss1.backward()
            loss1.detach_()
        else:
            options = {"keep_graph": False, "create_graph": False, "allow_unreachable": True, "accumulate_grad": True}
            engine = torch.autograd.Variable._execution_engine
            engine.run_backward(tuple(outputs1), tuple(output_grads1), **options)
        return outputs0, loss0


def layers_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return [make() for _ in range(count)]


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(17, WIDTH, generator=generator) for _ in "xy")
    return x, y


def make(layers: Sequence[nn.Module], schedule: str, executor: str, **options: Any) -> Pipeline:
    options = {"num_ranks": 2, "num_microbatches": 8, "loss_fn": nn.functional.mse_loss} | options
    torch.manual_seed(5)
    return Pipeline(layers, schedule, executor=executor, **options)


def num_stages(schedule: str, num_ranks: int) -> int:
    return num_ranks * (1 if schedule in ("dualpipe", "1f1b_overlap") else 2)


def compare(pipe: Pipeline, unsplit: Sequence[nn.Module], steps: int = 3, **options: Any) -> None:
    for step in range(steps):
        x, y = batch(step)
        result = pipe.step(x, target=y)
        numbers = options | ({"seed": 5, "step_count": step} if options else {})
        reference = reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss, **numbers)
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert all(map(same_bits, result.losses or [], reference.losses))
        assert not pipe.is_last or torch.equal(result.outputs, torch.cat(reference.outputs))
        assert not (wrong := unequal(pipe, Chain(dict(enumerate(unsplit))))), wrong


@pytest.mark.parametrize("overlap", ["always", "never", "auto"])
@pytest.mark.parametrize("schedule", PAIRED)
def test_together_and_in_order(schedule: str, overlap: str, executor: str) -> None:
    count = num_stages(schedule, 2)
    pipe = make(layers_of(Layer, count), schedule, executor, overlap=overlap)
    compare(pipe, layers_of(Layer, count))
    counts = pipe._steps.ranks.pair_counts()
    assert counts.fused == 0 and counts.in_order > 0, "the first step goes in order"
    assert (counts.together > 0) == (overlap == "always")


@pytest.mark.parametrize("schedule", PAIRED)
def test_dropout_inside_checkpoints(schedule: str, executor: str) -> None:
    """The unsplit model recomputes nothing: masks of a forward that got into a recompute would show."""
    count = num_stages(schedule, 2)
    layers = layers_of(lambda: Layer(0.3, recomputes=True), count)
    pipe = make(layers, schedule, executor, overlap="always", rng="per_microbatch")
    compare(pipe, layers_of(lambda: Layer(0.3), count), rng="per_microbatch")
    assert pipe._steps.ranks.pair_counts().together == 0, "a pair that draws and recomputes goes in order"


@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved_overlap"])
def test_dropout_inside_checkpoints_with_torchs_own_generator(schedule: str, executor: str) -> None:
    """One rank, whose order is that of the masks, with a helper that it must not use; against one that recomputes
    nothing."""
    pipes = [
        make(layers_of(partial(Layer, 0.3, recomputes), 2), schedule, executor, overlap=overlap, num_ranks=1)
        for recomputes, overlap in ((True, "always"), (False, "never"))
    ]
    for step in range(3):
        losses = []
        for pipe in pipes:
            x, y = batch(step)
            torch.manual_seed(step)
            losses.append(pipe.step(x, target=y).loss)
        assert same_bits(*losses) and not unequal(pipes[0], model_of(pipes[1]))
    assert pipes[0]._steps.ranks.pair_counts().together == 0


def model_of(pipe: Pipeline) -> Chain:
    """The layers of a pipeline with one layer a stage."""
    return Chain({stage.index: stage.modules[0] for stage in sorted(pipe._stages, key=lambda stage: stage.index)})


def test_what_draws_and_recomputes_nothing_goes_together(executor: str) -> None:
    pipe = make(layers_of(lambda: Layer(0.3), 2), "dualpipev", executor, overlap="always", num_ranks=1)
    for step in range(2):
        x, y = batch(step)
        pipe.step(x, target=y)
    assert pipe._steps.ranks.pair_counts().together > 0


def test_more_microbatches_than_the_pipeline_was_made_for_may_have_pairs(executor: str) -> None:
    """With one microbatch 1f1b_overlap fuses nothing, with eight it does."""
    layers = layers_of(lambda: Layer(0.3, recomputes=True), 1)
    pipe = make(layers, "1f1b_overlap", executor, overlap="always", num_ranks=1, num_microbatches=1)
    assert "\npairs" not in pipe.describe()
    for _ in range(2):
        pipe.step(batch()[0], target=batch()[1], num_microbatches=8)
    counts = pipe._steps.ranks.pair_counts()
    assert counts.together == 0 and counts.in_order > 0, "a pair that draws and recomputes goes in order"
    assert f"so far 0 together, {counts.in_order} in order" in pipe.describe()


class Normed(nn.Module):
    """Its recompute writes the buffers once more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


def test_a_stage_recomputes_beside_no_forward_of_its_own(executor: str) -> None:
    pipes = [
        make(layers_of(Normed, 1), "1f1b_overlap", executor, overlap=overlap, num_ranks=1)
        for overlap in ("always", "never")
    ]
    for pipe in pipes:
        for step in range(3):
            x, y = batch(step)
            pipe.step(x, target=y)
    states = [pipe.state_dict() for pipe in pipes]
    assert all(same_bits(found, states[1][name]) for name, found in states[0].items())
    assert pipes[0]._steps.ranks.pair_counts().together == 0


def test_what_is_settled_is_not_measured() -> None:
    pipe = make(layers_of(Layer, 1), "1f1b_overlap", "python", overlap="always", num_ranks=1)
    for _ in range(3):
        pipe.step(batch()[0], target=batch()[1])
    (held,) = pipe._steps.ranks._executors.values()
    assert pipe._steps.ranks.pair_counts().together > 0 and not held[0]._pairs._clocks  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", PAIRED)
def test_the_modules_own_method(schedule: str, executor: str) -> None:
    count = num_stages(schedule, 2)
    pipe = make(layers_of(Own, count), schedule, executor)
    Own.calls = 0
    compare(pipe, layers_of(Layer, count))
    pairs = sum(bool(action.pair_stage >= 0) for rank in pipe.schedule for action in rank)
    assert Own.calls == 3 * pairs == pipe._steps.ranks.pair_counts().fused > 0


@pytest.mark.parametrize("rng", [None, "per_microbatch"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_the_method_with_everything_else(reduction: str, rng: str | None, executor: str) -> None:
    """Dropout, checkpoints, weights of rows, and ranks that are threads."""
    p = 0.3 if rng else 0.0
    pipe = make(layers_of(lambda: Own(p, recomputes=True), 4), "dualpipev", executor, rng=rng, loss_reduction=reduction)
    unsplit = layers_of(lambda: Layer(p), 4)
    for step in range(2):
        x, y = batch(step)
        result = pipe.step(x, target=y)
        options = {"rng": rng, "seed": 5, "step_count": step} if rng else {}
        reference = reference_step(
            unsplit, (x, y), pipe.schedule, nn.functional.mse_loss, loss_reduction=reduction, **options
        )
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        assert not unequal(pipe, Chain(dict(enumerate(unsplit))))
    assert pipe._steps.ranks.pair_counts().fused > 0


def test_output_gradients_instead_of_a_loss(executor: str) -> None:
    pipes = [make(layers_of(kind, 4), "dualpipev", executor, loss_fn=None) for kind in (Own, Layer)]
    x, y = batch()
    for pipe in pipes:
        pipe.step(x, output_grad=y)
    assert not unequal(pipes[0], model_of(pipes[1]))
    assert pipes[0]._steps.ranks.pair_counts().fused > 0


def test_a_chain_of_layers_is_no_module_of_its_own(executor: str) -> None:
    pipe = make(layers_of(Own, 8), "dualpipev", executor)
    Own.calls = 0
    compare(pipe, layers_of(Layer, 8), steps=1)
    assert Own.calls == 0 and "overlapped_forward_backward" not in pipe.describe()


def bad(returned: Callable[[Any, Any], Any], backward: bool = True) -> type[nn.Module]:
    """A layer whose method returns something else, or runs no backward."""

    class Bad(Own):
        @classmethod
        def overlapped_forward_backward(cls, *args: Any) -> Any:
            *given, loss1, outputs1, grads1 = args
            if backward:
                return returned(*super().overlapped_forward_backward(*args))
            module0, inputs0, criterion0, labels0, _ = given
            output = module0(*inputs0)
            return [output], None if criterion0 is None else criterion0(output, *labels0)

    return Bad


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (lambda outputs, loss: None, r"returned a NoneType: return \(outputs0, loss0\)"),
        (lambda outputs, loss: (outputs, loss, loss), r"returned a tuple of 3"),
        (lambda outputs, loss: (None, loss), "returned a NoneType for outputs0"),
        (lambda outputs, loss: (outputs * 2, loss), "returned 2 outputs, and the forward of the stage 1"),
        (lambda outputs, loss: ([o.detach() for o in outputs], loss), "returned outputs without a graph"),
        (lambda outputs, loss: (outputs, outputs[0].sum() if loss is None else loss), "criterion0 was None"),
        (lambda outputs, loss: (outputs, None), "another loss0 than criterion0 gave"),
        (lambda outputs, loss: (outputs, loss if loss is None else 2 * loss), "another loss0 than criterion0 gave"),
        (None, "did not run the backward"),
    ],
)
def test_what_a_method_does_wrong(returned: Any, message: str, executor: str) -> None:
    kind = bad(returned) if returned else bad(lambda outputs, loss: None, backward=False)
    pipe = make(layers_of(kind, 4), "dualpipev", executor)
    x, y = batch()
    with pytest.raises(ValueError, match=message) as caught:
        pipe.step(x, target=y)
    assert "overlapped_forward_backward of stage" in str(caught.value)
    assert any("OVERLAP_F_B" in note for note in caught.value.__notes__)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("overlap", ["always", "never"])
def test_a_failing_half(overlap: str, backward: bool, executor: str) -> None:
    """The half is named, the other one is drained, and the next step works."""
    layers: list[nn.Module] = layers_of(Layer, 2)
    layers[0] = Fault(layers[0], 8 + 6, ValueError("on purpose"), backward=backward)
    pipe = make(layers, "dualpipev", executor, overlap=overlap, num_ranks=1)
    x, y = batch()
    pipe.step(x, target=y)
    with pytest.raises(ValueError, match="on purpose") as caught:
        pipe.step(x, target=y)
    (note,) = [note for note in caught.value.__notes__ if "raised on" in note]
    assert "stage 0" in note and note.endswith("microbatch 6") and ("OVERLAP" in note or backward)
    pipe.step(x, target=y)


def test_both_halves_fail(executor: str) -> None:
    """The forward's error is raised; the backward has ended by then."""
    layers: list[nn.Module] = layers_of(Layer, 2)
    ended = threading.Event()

    class Both(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer
            self.armed = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.armed and threading.current_thread() is threading.main_thread() and self.pairs():
                raise ValueError("forward")
            out: torch.Tensor = self.layer(x)
            out.register_hook(self.hook)
            return out

        def pairs(self) -> bool:
            self.calls += 1
            return self.calls == 5

        def hook(self, grad: torch.Tensor) -> None:
            if self.armed and threading.current_thread() is not threading.main_thread():
                time.sleep(0.05)
                ended.set()
                raise KeyError("backward")

        calls = 0

    both = [Both(layer) for layer in layers]
    pipe = make(both, "dualpipev", executor, overlap="always", num_ranks=1)
    x, y = batch()
    pipe.step(x, target=y)
    for each in both:
        each.armed = True
    with pytest.raises((ValueError, KeyError), match="forward|backward"):
        pipe.step(x, target=y)
    assert ended.is_set()
    for each in both:
        each.armed = False
    pipe.step(x, target=y)


class Shared(Layer):
    """Sees which thread a backward runs in, and how many threads its operators have."""

    seen: set[tuple[str, int, bool]]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x)
        out.register_hook(lambda grad: self.note())
        return out

    def note(self) -> None:
        main = threading.current_thread() is threading.main_thread()
        self.seen.add(("main" if main else "helper", torch.get_num_threads(), torch.is_autocast_enabled("cpu")))


def test_the_helper_computes_as_the_rank_does(executor: str) -> None:
    """As many intra-op threads, autocast as it is; and a parameter that both stages have is summed as without it."""
    Shared.seen = set()
    grads: list[list[Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for overlap in ("always", "never"):
            (layer,) = layers_of(Shared, 1)
            pipe = make([layer, layer], "dualpipev", executor, overlap=overlap, num_ranks=1)
            with torch.autocast("cpu", torch.bfloat16):
                for step in range(2):
                    x, y = batch(step)
                    pipe.step(x, target=y)
            grads.append([p.grad for p in layer.parameters()])
        assert all(map(same_bits, *grads))
    finally:
        torch.set_num_threads(threads)
    assert Shared.seen == {("main", 2, True), ("helper", 2, True)}


def num_threads() -> int:
    """Of the whole process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


def test_the_helper_ends_with_the_pipeline(executor: str) -> None:
    def threads_after(pipes: int) -> int:
        for _ in range(pipes):
            pipe = make(layers_of(Layer, 2), "dualpipev", executor, overlap="always", num_ranks=1)
            for step in range(2):
                x, y = batch(step)
                pipe.step(x, target=y)
            assert pipe._steps.ranks.pair_counts().together > 0
            del pipe
        deadline = time.monotonic() + 5
        while gc.collect() and time.monotonic() < deadline or num_threads() > before and time.monotonic() < deadline:
            time.sleep(0.01)
        return num_threads()

    before = num_threads()
    threads_after(1)
    before = num_threads()
    assert threads_after(3) <= before


def test_the_halves_show_in_a_profile(executor: str) -> None:
    pipe = make(layers_of(Layer, 2), "dualpipev", executor, overlap="always", num_ranks=1)
    x, y = batch()
    pipe.step(x, target=y)
    config = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True, experimental_config=config) as profile:
        pipe.step(x, target=y)
    names = {event.name for event in profile.events()}
    pairs = [action for rank in pipe.schedule for action in rank if action.pair_stage >= 0]
    assert {f"PP:{action}" for action in pairs} <= names
    assert {f"PP:{action.pair_stage}B{action.pair_microbatch}" for action in pairs} <= names


def test_who_may_have_a_helper() -> None:
    cpu = torch.device("cpu")
    assert pair_policy("auto", 2, 4, cpu).way == MEASURED
    assert pair_policy("auto", 2, 2, cpu).way == pair_policy("auto", 1, 1, cpu).way == IN_ORDER
    assert pair_policy("auto", 1, 8, torch.device("cuda", 0)).way == IN_ORDER
    assert pair_policy("always", 8, 1, cpu).way == TOGETHER and pair_policy("never", 1, 8, cpu).way == IN_ORDER
    with pytest.raises(ValueError, match="overlap = 'often'"):
        make(layers_of(Layer, 4), "dualpipev", "python", overlap="often")


@pytest.mark.parametrize("wins", [False, True])
def test_what_was_faster_is_kept_for_long(wins: bool) -> None:
    clock = PairClock()

    def ways(count: int, wins: bool) -> list[bool]:
        found = []
        for i in range(count):
            found.append(clock.next())
            outlier = 50.0 if i % 5 == 0 else 0.0
            clock.note(found[-1], (1.0 if found[-1] == wins else 2.0) + outlier)
        return found

    for faster in (wins, not wins):
        assert sum(ways(2 * NUM_SAMPLES, faster)) == NUM_SAMPLES
        assert ways(NUM_KEPT, faster) == [faster] * NUM_KEPT


def test_it_is_told_how_pairs_run(executor: str) -> None:
    pipe = make(layers_of(Own, 4), "dualpipev", executor)
    assert "stages 0, 1, 2, 3 by their own overlapped_forward_backward" in pipe.describe()
    x, y = batch()
    pipe.step(x, target=y)
    fused = pipe._steps.ranks.pair_counts().fused
    assert f"so far 0 together, 0 in order, {fused} by the modules" in pipe.describe()
    assert "in order (overlap='never')" in make(layers_of(Own, 4), "dualpipev", executor, overlap="never").describe()
    assert "\npairs" not in make(layers_of(Own, 2), "1f1b", executor).describe()
