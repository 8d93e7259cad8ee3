"""Random numbers: masks by microbatch, and recomputes that meet their forward's masks, whatever runs beside them."""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe import Pipeline
from fastpipe.runtime.stage.random_numbers import generators_lock, microbatch_seed
from fastpipe.testing import Fault, reference_step
from tests.conftest import executors_in_turn, overlap_of
from tests.runtime.checks import same_bits
from tests.runtime.paired import SEED, WIDTH, Layer, batch, layers_of, make
from tests.runtime.paired import compare as compare_by

SCHEDULES = ["1f1b", "zbv", "dualpipev", "dualpipe", "1f1b_overlap", "interleaved_overlap", "looped_bfs"]
MODES: list[bool | str] = [False, True, "reentrant"]
mean_square = nn.functional.mse_loss


def dropping(mode: bool | str, count: int = 8, p: float = 0.3) -> list[nn.Module]:
    return layers_of(lambda: Layer(p, mode), count)


def pipeline(layers: Sequence[nn.Module], schedule: str, executor: str, count: int = 8, **options: Any) -> Pipeline:
    options = {"rng": "per_microbatch", "num_ranks": 4} | options
    return make(layers, schedule, executor, num_microbatches=count, **options)


def compare(pipe: Pipeline, layers: Sequence[nn.Module], steps: int = 3, **options: Any) -> None:
    compare_by(pipe, layers, steps, rng="per_microbatch", **options)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@executors_in_turn("schedule, mode", itertools.product(SCHEDULES, MODES))
def test_the_masks_are_those_of_the_unsplit_model(schedule: str, mode: bool | str, executor: str) -> None:
    """The unsplit model recomputes nothing, so a recompute with another mask than its forward's would show."""
    compare(pipeline(dropping(mode), schedule, executor), dropping(False))


def test_the_masks_do_not_depend_on_the_number_of_ranks(executor: str) -> None:
    """Only on where stages begin, which `partition` may say."""
    partition = [1, 3, 2, 2]
    for num_ranks, schedule in ((4, "1f1b"), (2, "interleaved_1f1b"), (2, "dualpipev"), (1, "dualpipev")):
        cut = partition if num_ranks > 1 else [4, 4]
        pipe = pipeline(dropping(True), schedule, executor, num_ranks=num_ranks, partition=cut)
        compare(pipe, dropping(False), steps=2, partition=cut)


class Noise(nn.Module):
    """Adds what it draws, and nothing else."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand(())


def noise_of(pipe: Pipeline) -> list[float]:
    """What each microbatch was given, by the two stages together."""
    outputs = pipe.eval_step(torch.zeros(4, 1)).outputs
    assert isinstance(outputs, torch.Tensor)
    return outputs.flatten().tolist()


def test_numbers_differ_by_stage_microbatch_and_step(executor: str) -> None:
    pipe = pipeline([Noise(), Noise()], "gpipe", executor, count=4, num_ranks=2)
    alone = pipeline([Noise(), nn.Identity()], "gpipe", executor, count=4, num_ranks=2)
    first = noise_of(pipe)
    assert len(set(first)) == 4 and first == noise_of(pipe), "an evaluation counts as no step"
    assert all(abs(a - 2 * b) > 1e-6 for a, b in zip(first, noise_of(alone), strict=True)), "stages draw the same"
    pipe.step_count = 1
    second = noise_of(pipe)
    assert not set(first) & set(second)
    pipe.step_count = 0
    assert noise_of(pipe) == first


def test_the_seed_is_that_of_torch(executor: str) -> None:
    drawn = []
    for seed in (SEED, SEED, SEED + 1):
        torch.manual_seed(seed)
        options = {"num_ranks": 2, "executor": executor, "rng": "per_microbatch"}
        drawn.append(noise_of(Pipeline([Noise(), Noise()], "gpipe", 4, **options)))
    assert drawn[0] == drawn[1] != drawn[2]


def test_what_counts_as_a_step(executor: str) -> None:
    layers = dropping(False, 4)
    layers[2] = Fault(layers[2], 8, ValueError("on purpose"))
    pipe = pipeline(layers, "1f1b", executor, count=4)
    x, y = batch()
    for _ in range(2):
        pipe.step(x, target=y)
    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="on purpose"):
        pipe.step(x, target=y)
    assert torch.equal(before, torch.get_rng_state()), "a failed step leaves the generator as it was"
    pipe.profile(x, target=y)
    pipe.eval_step(x, target=y)
    assert pipe.step_count == 2
    for wrong in (-1, 1.5):
        with pytest.raises(ValueError, match="step_count = "):
            pipe.step_count = wrong  # type: ignore[assignment]


class Alone(nn.Module):
    """Draws inside a checkpoint, and notes whether its thread had the generators to itself."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.masks: list[torch.Tensor] = []
        self.alone: list[bool] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.rand(x.shape) > 0.5
        self.masks.append(mask)
        self.alone.append(generators_lock().held_here())
        return self.linear(x) * mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return out


@executors_in_turn("schedule, rng", itertools.product(["1f1b", "zbv", "dualpipev"], [None, "per_microbatch"]))
def test_a_recompute_draws_the_mask_of_its_forward_beside_other_ranks(
    schedule: str, rng: str | None, executor: str
) -> None:
    """In the first step, and in those that know of it."""
    layers = [Alone() for _ in range(4)]
    pipe = pipeline(layers, schedule, executor, count=4, num_ranks=2, rng=rng, overlap=overlap_of(executor))
    x, y = batch()
    for _ in range(3):
        pipe.step(x, target=y)
        for layer in layers:
            masks = [mask.flatten().tolist() for mask in layer.masks]
            assert layer.alone == [True] * 8 and len(masks) == 8
            assert sorted(masks)[::2] == sorted(masks)[1::2], "each mask is drawn twice"
            layer.masks.clear()
            layer.alone.clear()


def exclusive(pipe: Pipeline) -> tuple[bool, bool]:
    """Whether forwards excluded each other in the last step, and whether all actions did."""
    random = pipe._steps.random
    return random.guards_forward, random.guard.exclusive


@pytest.mark.parametrize(
    ("mode", "rng", "training", "evaluation"),
    [
        (False, None, (False, False), (False, False)),
        (True, None, (True, True), (False, False)),
        (False, "per_microbatch", (True, False), (False, False)),
        (True, "per_microbatch", (True, True), (False, False)),
    ],
)
def test_what_excludes_each_other(
    mode: bool | str, rng: str | None, training: tuple[bool, bool], evaluation: tuple[bool, bool], executor: str
) -> None:
    layers = [nn.Linear(WIDTH, WIDTH), Layer(0.3), Layer(0.3, mode), nn.Linear(WIDTH, WIDTH)]
    pipe = pipeline(layers, "1f1b", executor, rng=rng)
    x, y = batch()
    pipe.step(x, target=y)
    assert exclusive(pipe) == (True, True), "in the first step anything may happen"
    pipe.step(x, target=y)
    assert exclusive(pipe) == training
    pipe.eval()
    for expected in ((True, True), evaluation):
        pipe.eval_step(x, target=y)
        assert exclusive(pipe) == expected
    pipe.train()
    pipe.step(x, target=y)
    assert exclusive(pipe) == training, "what training does is still known"


def test_where_nothing_draws_nothing_is_exclusive(executor: str) -> None:
    pipe = pipeline(dropping(True, p=0.0), "1f1b", executor)
    alone = pipeline(dropping(True), "1f1b", executor, num_ranks=1, rng=None)
    x, y = batch()
    for _ in range(2):
        pipe.step(x, target=y)
        alone.step(x, target=y)
        assert all(stage.random is None for stage in alone._steps.stages), "one rank, no pairs, no seed"
    assert exclusive(pipe) == (False, False)


class GradientOf(nn.Module):
    """Differentiates in evaluation, too, as a model of forces does; returns a view made outside of that."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad((y**3).sum(), y, create_graph=True)
        return grad.view_as(x)


def test_a_view_without_a_node_in_an_evaluation(executor: str) -> None:
    """Of a tensor with a graph, it requires a gradient."""
    layers = [nn.Linear(WIDTH, WIDTH), GradientOf(), nn.Linear(WIDTH, WIDTH), nn.Identity()]
    x, y = batch()
    loss = pipeline(layers, "1f1b", executor).eval_step(x, target=y).loss
    assert torch.isclose(loss, nn.functional.mse_loss(nn.Sequential(*layers)(x), y))


class Changing(nn.Module):
    """Begins to draw, or to recompute, without being told by `train` or `eval`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.draws = self.recomputes = False

    def body(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * (torch.rand(x.shape) if self.draws else 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("what", "rng", "others", "refused", "then"),
    [
        ("draws", "per_microbatch", None, "random numbers were drawn", (True, False)),
        ("draws", None, None, None, (False, False)),
        ("draws", None, "saved", None, (True, True)),
        ("recomputes", "per_microbatch", "plain", "a backward recomputed", (True, True)),
        ("recomputes", None, "plain", "a backward recomputed", (True, True)),
        ("recomputes", None, "saved", None, (True, True)),
    ],
)
def test_what_was_known_no_longer_holds(
    what: str, rng: str | None, others: str | None, refused: str | None, then: tuple[bool, bool], executor: str
) -> None:
    """A step that may be wrong is refused, once; from then on it is right."""
    changing = Changing()
    beside = dropping(False if others == "plain" else others, 1) if others else [nn.Linear(WIDTH, WIDTH)]
    layers = [*beside, changing, *(nn.Linear(WIDTH, WIDTH) for _ in "ab")]
    pipe = pipeline(layers, "1f1b", executor, rng=rng)
    x, y = batch()
    for _ in range(2):
        pipe.step(x, target=y)
    setattr(changing, what, True)
    if refused is not None:
        with pytest.raises(RuntimeError, match=refused) as caught:
            pipe.step(x, target=y)
        assert "zero the gradients and call step again" in str(caught.value)
    assert pipe.step_count == 2
    for _ in range(2):
        pipe.step(x, target=y)
    assert exclusive(pipe) == then


class DrawingBackward(nn.Linear):
    """Adds noise to its output's gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output = super().forward(x)
        if output.requires_grad:
            output.register_hook(lambda grad: grad + torch.rand(grad.shape))
        return output


def test_a_backward_that_draws_does_not_change_the_masks(executor: str) -> None:
    """Its numbers come from the generator that seeded forwards put back, so it excludes them."""
    layers = [Layer(0.3), DrawingBackward(WIDTH, WIDTH), Layer(0.3), nn.Linear(WIDTH, WIDTH)]
    pipe = pipeline(layers, "1f1b", executor)
    x, y = batch()
    before = torch.get_rng_state()
    for step in range(3):
        result = pipe.step(x, target=y)
        reference = reference_step(
            layers, batch(), pipe.schedule, mean_square, rng="per_microbatch", seed=SEED, step_count=step
        )
        assert result.loss is not None and same_bits(result.loss, reference.loss)
        torch.set_rng_state(before)
    assert exclusive(pipe) == (True, True)


def test_a_function_of_ones_own_may_set_the_generator(executor: str) -> None:
    """Its backward makes no graph and leaves the generator as it was, so only the graph shows it."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            ctx.state = torch.get_rng_state()
            return x * torch.rand(x.shape)

        @staticmethod
        def backward(ctx: Any, *grads: torch.Tensor) -> torch.Tensor:
            with torch.random.fork_rng(devices=[]):
                torch.set_rng_state(ctx.state)
                return grads[0] * torch.rand(grads[0].shape)

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = Own.apply(super().forward(x))  # type: ignore[no-untyped-call]
            return out

    layers: list[nn.Module] = [Layer(WIDTH, WIDTH), *(nn.Linear(WIDTH, WIDTH) for _ in range(3))]
    twin = copy.deepcopy(layers)
    pipe = pipeline(layers, "1f1b", executor)
    compare(pipe, twin)
    assert exclusive(pipe) == (True, True)


def test_the_seeds() -> None:
    """The same on every machine; the first ones are written down."""
    assert [hex(microbatch_seed(*four)) for four in ((0, 0, 0, 0), (5, 1, 2, 3), (2**64 - 1, 7, 0, 0))] == SEEDS
    fours = [(seed, step, stage, i) for seed in (0, SEED) for step in range(9) for stage in range(8) for i in range(16)]
    assert len({microbatch_seed(*four) % 2**32 for four in fours}) == len(fours)


SEEDS = ["0x238275bc38fcbe91", "0x9861e3adf106dee6", "0xeed20827a0dbb7f2"]


def test_the_reference_needs_layers() -> None:
    schedule = pipeline(dropping(False), "1f1b", "python").schedule
    with pytest.raises(TypeError, match="give the list of the model's layers"):
        reference_step(dropping(False)[0], batch(), schedule, mean_square, rng="per_microbatch")
    with pytest.raises(ValueError, match="rng = 'often'"):
        reference_step(dropping(False), batch(), schedule, mean_square, rng="often")
