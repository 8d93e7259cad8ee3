"""What stages pass on unchanged crosses to a rank once, where a placement visits ranks several times."""

from collections import Counter
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe import Pipeline, make_schedule
from fastpipe.program import Program
from fastpipe.runtime.common import Tensors
from fastpipe.runtime.model.chain import Chain
from fastpipe.runtime.transport.transport import Endpoint, Message
from fastpipe.testing import Loopback, reference_step
from tests.conftest import executors_in_turn, skip_without_native
from tests.runtime.checks import assert_same, same_bits
from tests.runtime.models import squared
from tests.runtime.tree_models import WIDTH, WithLinear

MICROBATCHES = 4


class Counting(Loopback):
    """Counts the tensors that cross a rank boundary, treespecs aside, by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def endpoint(self, program: Program, rank: int, timeout: float) -> Endpoint:
        found = super().endpoint(program, rank, timeout)
        send = found.send

        def counts(message: Message, channel: int, number: int, tensors: Tensors | None) -> None:
            sent = [t for t in tensors or () if t.dtype is not torch.uint8]
            self.counts[message.kind.name.lower()] += len(sent)
            send(message, channel, number, tensors)

        found.send = counts  # type: ignore[method-assign]
        return found


class Residual(nn.Module):
    """Block Attention Residuals: reads what all earlier blocks made."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.score = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, blocks: tuple[torch.Tensor, ...] = ()) -> Any:
        among = torch.stack([*blocks, x])
        x = (self.score(among).softmax(0) * among).sum(0)
        return fastpipe.carry(x, blocks=(*blocks, torch.tanh(self.linear(x))))


class Last(WithLinear):
    def forward(self, x: torch.Tensor, blocks: tuple[torch.Tensor, ...]) -> torch.Tensor:
        return self.linear(x + sum(blocks))


class Changes(WithLinear):
    """Changes in place what others read later."""

    def forward(self, x: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor) -> Any:
        x = self.linear(x) * scale.clone() + memory
        scale.mul_(0.5)
        memory.add_(0.25)
        return x


class Starts(nn.Module):
    """A value with a gradient and one without."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor) -> Any:
        x, memory = self.linear(x).chunk(2, -1)
        return fastpipe.carry(x.clone(), scale=torch.full((1, WIDTH), 0.9), memory=memory.clone())


class Reads(WithLinear):
    def forward(self, x: torch.Tensor, scale: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        # a clone, as a product saves what is changed in place later
        return torch.tanh(self.linear(x)) * scale.clone() + memory


class Passes(WithLinear):
    """Reads nothing of what is carried."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x))


class Masks(WithLinear):
    """A plain tuple, of which the second is new in every stage."""

    def forward(self, x: torch.Tensor, *mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x = torch.tanh(self.linear(x if not mask else x + 0.3 * mask[0]))
        return x, x.detach() > 0


MODELS = {
    "masks": lambda n: [*(Masks() for _ in range(n - 1)), Passes()],
    "residuals": lambda n: [*(Residual() for _ in range(n - 1)), Last()],
    "read": lambda n: [Starts(), *(Reads() for _ in range(n - 1))],
    "read_once": lambda n: [Starts(), *(Passes() for _ in range(n - 2)), Reads()],
    "changed": lambda n: [Starts(), *(Changes() if i % 3 == 1 else Reads() for i in range(n - 1))],
}
PLACES = {"interleaved_zb": (2, 4), "zbv": (4, 2), "dualpipev": (2, 2)}
"""Ranks, and stages on each."""


def made(model: str, count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return MODELS[model](count)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(2 * MICROBATCHES + 1, WIDTH), torch.randn(2 * MICROBATCHES + 1, WIDTH)


def pipeline(model: str, schedule: str, executor: str = "python", **options: Any) -> Pipeline:
    ranks, stages = PLACES[schedule]
    wants = {"stages_per_rank": stages} if schedule not in ("zbv", "dualpipev") else {}
    layers = made(model, ranks * stages)
    options |= {"num_ranks": ranks, "executor": executor}
    return Pipeline(layers, schedule, MICROBATCHES, squared, **wants, **options)


def grads_of(pipe: Pipeline) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in pipe.named_parameters() if p.grad is not None}


def nothing_is_left(pipe: Pipeline) -> bool:
    return all(
        s.held is None or not (s.held.tensors or s.held.grads or s._received_tensors) for s in pipe._steps.stages
    )


@executors_in_turn("schedule, model", product(PLACES, MODELS))
def test_without_the_option_the_unsplit_models_bits(schedule: str, model: str, executor: str) -> None:
    x, target = batch()
    pipe = pipeline(model, schedule, executor)
    unsplit = Chain(dict(enumerate(made(model, pipe.num_stages))))
    for _ in range(2):
        result = pipe.step(x, target=target)
        assert_same(pipe, result, unsplit, reference_step(unsplit, (x, target), pipe.schedule, squared))
        assert nothing_is_left(pipe)


@pytest.mark.parametrize("schedule", PLACES)
@pytest.mark.parametrize("model", MODELS)
def test_with_it_the_same_sums_in_another_order(model: str, schedule: str) -> None:
    """Losses and outputs keep their bits; the executors agree in all; a value read by one stage has one order only."""
    skip_without_native()
    x, target = batch()
    pipes = [pipeline(model, schedule, name, cache_carried=True) for name in ("python", "native")]
    unsplit = Chain(dict(enumerate(made(model, pipes[0].num_stages))))
    for _ in range(2):
        results = [pipe.step(x, target=target) for pipe in pipes]
        reference = reference_step(unsplit, (x, target), pipes[0].schedule, squared)
        for pipe, result in zip(pipes, results, strict=True):
            assert result.loss is not None and same_bits(result.loss, reference.loss)
            assert nothing_is_left(pipe)
    ours, theirs = map(grads_of, pipes)
    expected = {name: p.grad for name, p in unsplit.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys() == expected.keys()
    for name, grad in ours.items():
        assert same_bits(grad, theirs[name]), name
        torch.testing.assert_close(grad, expected[name], rtol=1e-5, atol=1e-6)
        assert model != "read_once" or same_bits(grad, expected[name]), name


def counted(model: str, schedule: str, step: str = "step", **options: Any) -> dict[str, int]:
    x, target = batch()
    transport = Counting()
    pipe = pipeline(model, schedule, transport=transport, **options)
    getattr(pipe, step)(x, target=target)
    assert all(count % MICROBATCHES == 0 for count in transport.counts.values())
    return {kind: count // MICROBATCHES for kind, count in transport.counts.items()}


def test_block_attention_residuals_send_57_tensors_instead_of_135(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four ranks with four stages each, a microbatch; and as many gradients come back."""
    monkeypatch.setitem(PLACES, "interleaved_1f1b", (4, 4))
    assert counted("residuals", "interleaved_1f1b") == {"activation": 135, "gradient": 135}
    assert counted("residuals", "interleaved_1f1b", cache_carried=True) == {"activation": 57, "gradient": 57}
    assert counted("residuals", "interleaved_1f1b", "eval_step") == {"activation": 57}


def test_what_has_no_gradient_crosses_once_in_any_case() -> None:
    """Of zbv's eight stages on four ranks six boundaries are between ranks. The scale crosses three of them, the memory
    six; with the option it is made on the rank of the last stage."""
    assert counted("read", "zbv") == {"activation": 6 + 3 + 6, "gradient": 6 + 6}
    assert counted("read", "zbv", cache_carried=True) == {"activation": 6 + 3 + 3, "gradient": 6 + 3}


def test_a_failed_step_leaves_nothing(executor: str) -> None:
    x, target = batch()
    pipe = pipeline("residuals", "zbv", executor, cache_carried=True)
    first = pipe.step(x, target=target)
    expected = {name: grad.clone() for name, grad in grads_of(pipe).items()}
    with pytest.raises(RuntimeError, match="must match the size"):  # in the last stage
        pipe.step(x, target=target[:, :4])
    assert nothing_is_left(pipe)
    for parameter in pipe.parameters():
        parameter.grad = None
    again = pipe.step(x, target=target)
    assert first.loss is not None and again.loss is not None and same_bits(first.loss, again.loss)
    assert all(same_bits(grad, expected[name]) for name, grad in grads_of(pipe).items())


def test_ranks_that_are_visited_once_hold_nothing() -> None:
    pipe = Pipeline(made("read", 4), make_schedule("1f1b", num_ranks=4, num_microbatches=4), loss_fn=squared)
    assert all(stage.held is None for stage in pipe._steps.stages)
    assert "carried     once to each rank" in pipeline("read", "zbv", cache_carried=True).describe()
    with pytest.raises(ValueError, match="cache_carried = 1: give True or False"):
        Pipeline(made("read", 4), "1f1b", 4, squared, num_ranks=4, cache_carried=1)  # type: ignore[arg-type]


def test_recomputed_layers(executor: str) -> None:
    x, target = batch()
    plain, recomputed = (
        pipeline("residuals", "zbv", executor, cache_carried=True, recompute=way) for way in ("none", "full")
    )
    for pipe in (plain, recomputed):
        pipe.step(x, target=target)
    assert all(same_bits(grad, grads_of(recomputed)[name]) for name, grad in grads_of(plain).items())
