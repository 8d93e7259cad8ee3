"""Pairs of a forward and a backward, together and in order; the bits are the same."""

import gc
import os
import threading
import time
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe.runtime import native
from fastpipe.runtime.stage.pairs import IN_ORDER, IN_TURNS, MEASURED, TOGETHER, pair_policy
from fastpipe.testing import Fault
from tests.conftest import NATIVE, overlap_of
from tests.patience import PATIENCE
from tests.runtime.checks import same_bits, unequal
from tests.runtime.paired import PAIRED, WIDTH, Layer, Own, batch, compare, layers_of, make, model_of, num_stages, run


@pytest.mark.parametrize(
    ("executor", "overlap"),
    [("native", "always"), ("native", "never"), ("native", "auto"), ("python", "auto")],
    indirect=["executor"],
)
@pytest.mark.parametrize("schedule", PAIRED)
def test_together_and_in_order(schedule: str, overlap: str, executor: str) -> None:
    count = num_stages(schedule, 2)
    pipe = make(layers_of(Layer, count), schedule, executor, overlap=overlap)
    compare(pipe, layers_of(Layer, count))
    counts = pipe._steps.ranks.pair_counts()
    assert counts["fused"] == 0 and counts["in order"] > 0, "the first step goes in order"
    assert (counts["together"] > 0) == (overlap == "always")


@pytest.mark.parametrize("schedule", ["dualpipev", "interleaved_overlap"])
def test_dropout_inside_checkpoints_with_torchs_own_generator(schedule: str, executor: str) -> None:
    """One rank, whose order is that of the masks, with a helper that it must not use; against one that recomputes
    nothing."""
    pipes = [
        make(layers_of(partial(Layer, 0.3, recomputes), 2), schedule, executor, overlap=overlap, num_ranks=1)
        for recomputes, overlap in ((True, overlap_of(executor)), (False, "never"))
    ]
    for step in range(3):
        losses = []
        for pipe in pipes:
            x, y = batch(step)
            torch.manual_seed(step)
            losses.append(pipe.step(x, target=y).loss)
        assert same_bits(*losses) and not unequal(pipes[0], model_of(pipes[1]))
    assert pipes[0]._steps.ranks.pair_counts()["together"] == 0


@NATIVE
def test_describe_says_why_pairs_go_in_order(executor: str) -> None:
    layers = [Layer(0.3), Layer(), Layer(recomputes=True), Layer()]
    pipe = make(layers, "dualpipev", executor, overlap="always")
    assert "; in order: stages that use random numbers or write buffers in a recompute" in pipe.describe()
    for step in range(3):
        x, y = batch(step)
        pipe.step(x, target=y)
        pipe.eval_step(x, target=y)
    words = "; so far 0 together"
    assert words in pipe.describe()
    assert pipe._steps.ranks.pair_counts()["in order"] > 0


@NATIVE
def test_describe_names_stages_that_cannot_overlap_with_themselves(executor: str) -> None:
    pipe = make([Layer(), Layer(recomputes=True)], "1f1b_overlap", executor, overlap="always")
    run(pipe, 2)
    assert "; in order: stages 0, 1 with themselves" in pipe.describe()
    assert "in order:" not in make(layers_of(Layer, 2), "1f1b_overlap", executor, overlap="never").describe()


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_an_interrupt_inside_a_pair(backward: bool, executor: str) -> None:
    """It comes through, the other half of the pair comes to its end, and the next step works."""
    microbatch = 4
    faulty = Fault(Layer(), 2 * 8 + microbatch, KeyboardInterrupt(), backward=backward)
    pipe = make([faulty, *layers_of(Layer, 3)], "dualpipev", executor, overlap=overlap_of(executor))
    kind = "B" if backward else "F"
    parts = {str(part) for rank in pipe.schedule for action in rank if len(action.parts) == 2 for part in action.parts}
    assert f"0{kind}{microbatch}" in parts
    run(pipe, 2)
    assert (pipe._steps.ranks.pair_counts()["together"] > 0) == (executor == "native")
    x, y = batch(1)
    with pytest.raises(KeyboardInterrupt):
        pipe.step(x, target=y)
    unsplit = model_of(pipe)
    losses = [pipe.step(x, target=y).loss for _ in range(2)]
    output = x
    for index in range(4):
        output = unsplit.get_submodule(str(index))(output)
    assert losses[0] is not None and same_bits(*losses)
    torch.testing.assert_close(losses[0], nn.functional.mse_loss(output, y).detach())


@NATIVE
def test_what_draws_and_recomputes_nothing_goes_together(executor: str) -> None:
    pipe = make(layers_of(lambda: Layer(0.3), 2), "dualpipev", executor, overlap="always", num_ranks=1)
    run(pipe, 2)
    assert pipe._steps.ranks.pair_counts()["together"] > 0


@NATIVE
def test_more_microbatches_than_the_pipeline_was_made_for_may_have_pairs(executor: str) -> None:
    """With one microbatch 1f1b_overlap fuses nothing, with eight it does."""
    layers = layers_of(lambda: Layer(0.3, recomputes=True), 1)
    pipe = make(layers, "1f1b_overlap", executor, overlap="always", num_ranks=1, num_microbatches=1)
    assert "\npairs" not in pipe.describe()
    for _ in range(2):
        pipe.step(batch()[0], target=batch()[1], num_microbatches=8)
    counts = pipe._steps.ranks.pair_counts()
    assert counts["together"] == 0 and counts["in order"] > 0, "a pair that draws and recomputes goes in order"
    assert f"so far 0 together, {counts['in order']} in order" in pipe.describe()


class Normed(nn.Module):
    """Its recompute writes the buffers once more."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


@NATIVE
def test_a_stage_recomputes_beside_no_forward_of_its_own(executor: str) -> None:
    pipes = [
        make(layers_of(Normed, 1), "1f1b_overlap", executor, overlap=overlap, num_ranks=1)
        for overlap in ("always", "never")
    ]
    for pipe in pipes:
        run(pipe, 3)
    states = [pipe.state_dict() for pipe in pipes]
    assert all(same_bits(found, states[1][name]) for name, found in states[0].items())
    assert pipes[0]._steps.ranks.pair_counts()["together"] == 0


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("executor", "overlap"), [("native", "always"), ("native", "never"), ("python", "never")], indirect=["executor"]
)
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


@NATIVE
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


@NATIVE
def test_the_helper_computes_as_the_rank_does(executor: str) -> None:
    """As many intra-op threads, no autocast; and a parameter that both stages have is summed as without it."""
    Shared.seen = set()
    grads: list[list[Any]] = []
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        for overlap in ("always", "never"):
            (layer,) = layers_of(Shared, 1)
            pipe = make([layer, layer], "dualpipev", executor, overlap=overlap, num_ranks=1)
            with torch.autocast("cpu", torch.bfloat16):
                run(pipe, 2)
            grads.append([p.grad for p in layer.parameters()])
        assert all(map(same_bits, *grads))
    finally:
        torch.set_num_threads(threads)
    assert Shared.seen == {("main", 2, False), ("helper", 2, False)}


def num_threads() -> int:
    """Of the whole process, Python's and others."""
    return len(os.listdir("/proc/self/task"))


@NATIVE
def test_the_helper_ends_with_the_pipeline(executor: str) -> None:
    def drop(pipes: int) -> None:
        for _ in range(pipes):
            pipe = make(layers_of(Layer, 2), "dualpipev", executor, overlap="always", num_ranks=1)
            run(pipe, 2)
            assert pipe._steps.ranks.pair_counts()["together"] > 0

    drop(1)
    before = num_threads()
    drop(3)
    deadline = time.monotonic() + PATIENCE
    while (gc.collect() or num_threads() > before) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert num_threads() <= before


def test_who_may_have_a_helper() -> None:
    cpu = torch.device("cpu")
    assert pair_policy("auto", 2, 4, cpu)[0] == MEASURED
    assert pair_policy("auto", 2, 2, cpu)[0] == pair_policy("auto", 1, 1, cpu)[0] == IN_ORDER
    assert pair_policy("auto", 1, 8, torch.device("cuda", 0))[0] == IN_ORDER
    assert pair_policy("auto", 1, 8, cpu, by_python=True)[0] == IN_ORDER
    assert pair_policy("auto", 1, 8, cpu, dimensions=["ep"], by_python=True)[0] == IN_TURNS
    assert pair_policy("always", 8, 1, cpu)[0] == TOGETHER and pair_policy("never", 1, 8, cpu)[0] == IN_ORDER
    with pytest.raises(ValueError, match="overlap = 'often'"):
        make(layers_of(Layer, 4), "dualpipev", "python", overlap="often")


def test_the_python_executor_runs_one_half_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = make(layers_of(Layer, 4), "dualpipev", "python")
    run(pipe, 2)
    count = pipe._steps.ranks.pair_counts()["in order"]
    said = f"in order (the Python executor runs one half at a time); so far 0 together, {count} in order"
    assert count > 0 and said in pipe.describe()
    monkeypatch.setattr(native, "load", lambda: None)
    for executor in ("python", "auto"):
        said = f"overlap = 'always' with executor = '{executor}': .*; set overlap='auto' or 'never'"
        with pytest.raises(ValueError, match=said):
            make(layers_of(Layer, 4), "dualpipev", executor, overlap="always")


def test_it_is_told_how_pairs_run(executor: str) -> None:
    pipe = make(layers_of(Own, 4), "dualpipev", executor)
    assert "stages 0, 1, 2, 3 by their own overlapped_forward_backward" in pipe.describe()
    x, y = batch()
    pipe.step(x, target=y)
    fused = pipe._steps.ranks.pair_counts()["fused"]
    assert f"so far 0 together, 0 in order, {fused} by the modules" in pipe.describe()
    assert "in order (overlap='never')" in make(layers_of(Own, 4), "dualpipev", executor, overlap="never").describe()
    assert "\npairs" not in make(layers_of(Own, 2), "1f1b", executor).describe()
