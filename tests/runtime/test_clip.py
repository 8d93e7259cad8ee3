"""Clipping: the norm and the clipped gradients are those of `torch.nn.utils.clip_grad_norm_` on the unsplit model."""

import logging
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import GradScaler, Pipeline, StepError
from fastpipe.runtime.model import NamedTensor
from fastpipe.runtime.stage.stage import Chain
from fastpipe.runtime.step.clip import GradNorms
from tests.runtime.checks import reference_of, same_bits, train_and_compare, unequal
from tests.runtime.models import CASES, Block, Case


def mixed_dtypes(n: int) -> list[nn.Module]:
    """Layers of two dtypes: torch takes the norms of one dtype first."""
    return [Cast(torch.double if i % 3 == 1 else torch.float) for i in range(n)]


class Cast(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.block = Block().to(dtype)
        self.dtype = dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(x.to(self.dtype)).float()


MIXED = Case(mixed_dtypes)


def clip_both(case: Case, schedule: str, count: int = 4, norm_type: Any = 2.0, max_norm: float = 0.1, **options: Any):
    """One step of the pipeline and of the unsplit model, both clipped: the pipeline, the model, the two norms."""
    options = {"num_ranks": None if dist.is_initialized() else 2, **options}
    pipe = Pipeline(case.layers(9), schedule, count, case.loss_fn, split=case.split, **options)
    unsplit = Chain(dict(enumerate(case.layers(9))))
    batch, twin = case.batches(1, 2 * count + 1)[0], case.batches(1, 2 * count + 1)[0]
    pipe.step(*batch.args, target=batch.target, **batch.kwargs)
    reference_of(unsplit, twin, pipe, case)
    norm = pipe.clip_grad_norm_(max_norm, norm_type)
    expected = torch.nn.utils.clip_grad_norm_(unsplit.parameters(), max_norm, norm_type)
    return pipe, unsplit, norm, expected


def assert_clipped_alike(*args: Any, **options: Any) -> None:
    pipe, unsplit, norm, expected = clip_both(*args, **options)
    assert same_bits(norm, expected), (norm, expected)
    assert float(norm) > 0.1 or options.get("max_norm")
    assert not (wrong := unequal(pipe, unsplit)), wrong


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "dualpipe", "interleaved_1f1b"])
def test_the_norm_is_that_of_the_unsplit_model(schedule: str, executor: str) -> None:
    assert_clipped_alike(CASES["plain"], schedule, executor=executor)


@pytest.mark.parametrize("case", ["bfloat16", "channels_last", "frozen_last", "tokens", "unused", "mixed"])
def test_odd_models(case: str) -> None:
    assert_clipped_alike(MIXED if case == "mixed" else CASES[case], "dualpipev")


@pytest.mark.parametrize("norm_type", [1, 3.0, math.inf, "inf", 0.5])
def test_other_norms(norm_type: Any) -> None:
    assert_clipped_alike(CASES["plain"], "1f1b", norm_type=norm_type)


def test_a_large_limit_only_measures() -> None:
    assert_clipped_alike(CASES["plain"], "1f1b", max_norm=math.inf)


def test_squares_summed_by_rank_differ() -> None:
    """The comparison can fail: the usual way to do it has other last bits in some of these models."""
    found = []
    for width in range(20, 40):
        torch.manual_seed(width)
        layers = [Block(width) for _ in range(12)]
        pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=4)
        pipe.step(torch.randn(6, width), target=torch.randn(6, width))
        parts = [[p.grad for p in module.parameters()] for module in pipe.stage_modules.values()]
        usual = torch.stack([torch.nn.utils.get_total_norm(part) ** 2 for part in parts]).sum().sqrt()
        expected = torch.nn.utils.get_total_norm([p.grad for layer in layers for p in layer.parameters()])
        assert same_bits(pipe.clip_grad_norm_(math.inf), expected)
        found.append(same_bits(usual, expected))
    assert not all(found)


def test_training_goes_on_after_clipping(executor: str) -> None:
    """Steps, clipping and an optimizer in turn: what is clipped is what the optimizer of the unsplit model sees."""
    case = CASES["plain"]
    pipe = Pipeline(case.layers(8), "dualpipe", 4, case.loss_fn, num_ranks=2, executor=executor)
    unsplit = Chain(dict(enumerate(case.layers(8))))
    ours, theirs = (torch.optim.AdamW(list(m.parameters()), lr=0.1) for m in (pipe, unsplit))
    for batch, twin in zip(*(case.batches(3, 9) for _ in "ab"), strict=True):
        ours.zero_grad(), theirs.zero_grad()
        pipe.step(*batch.args, target=batch.target)
        reference_of(unsplit, twin, pipe, case)
        assert same_bits(pipe.clip_grad_norm_(0.05), torch.nn.utils.clip_grad_norm_(unsplit.parameters(), 0.05))
        ours.step(), theirs.step()
    state = unsplit.state_dict()
    assert all(same_bits(value, state[name]) for name, value in pipe.state_dict().items())


def test_a_sparse_gradient_is_refused_by_name() -> None:
    layers = [nn.Embedding(5, 4, sparse=True), nn.Linear(4, 4)]
    pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    pipe.step(torch.randint(5, (4,)), target=torch.randn(4, 4))
    with pytest.raises(ValueError, match=r"0\.weight \(stage 0\) .*sparse=True.*to_dense"):
        pipe.clip_grad_norm_(1.0)
    layers[0].weight.grad = layers[0].weight.grad.to_dense()
    assert pipe.clip_grad_norm_(1.0) > 0


def test_nothing_to_clip() -> None:
    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, CASES["plain"].loss_fn, num_ranks=2)
    assert same_bits(
        pipe.clip_grad_norm_(1.0), torch.nn.utils.clip_grad_norm_(CASES["plain"].layers(4)[0].parameters(), 1)
    )


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_named(bad: float, caplog: pytest.LogCaptureFixture) -> None:
    case = CASES["plain"]
    pipe = train_and_compare("plain", "1f1b", 4, num_ranks=2, steps=1, num_layers=4)
    parameter = dict(pipe.named_parameters())["2.linear.bias"]
    parameter.grad[1] = bad
    before = [p.grad.clone() for p in pipe.parameters()]
    with pytest.raises(StepError, match=r"2\.linear\.bias \(stage 1, rank 0\)") as caught:
        pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
    assert caught.value.stage == 1 and isinstance(caught.value, RuntimeError)
    assert all(same_bits(a, p.grad) for a, p in zip(before, pipe.parameters(), strict=True))
    with caplog.at_level(logging.WARNING, "fastpipe"):
        norm = pipe.clip_grad_norm_(1.0)
    assert "2.linear.bias (stage 1" in caplog.text
    unsplit = Chain(dict(enumerate(case.layers(4))))
    for p, grad in zip(unsplit.parameters(), before, strict=True):
        p.grad = grad
    assert same_bits(norm, torch.nn.utils.clip_grad_norm_(unsplit.parameters(), 1.0)) and not unequal(pipe, unsplit)


def test_an_overflow_that_a_scaler_skips_is_nothing_to_warn_of(caplog: pytest.LogCaptureFixture) -> None:
    pipe = train_and_compare("plain", "1f1b", 4, num_ranks=2, steps=1, num_layers=4)
    GradScaler(pipe)
    next(iter(pipe.parameters())).grad[0] = math.inf
    with caplog.at_level(logging.INFO, "fastpipe"):
        pipe.clip_grad_norm_(1.0)
    assert [record.levelno for record in caplog.records if "not finite" in record.message] == [logging.INFO]


def test_a_norm_that_overflows_names_no_gradient() -> None:
    layers = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    pipe = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    for layer in layers:
        layer.weight.grad = torch.full((1, 1), 3e38)
    with pytest.raises(StepError, match="each gradient is finite, but their norm overflows"):
        pipe.clip_grad_norm_(1.0, 1.0, error_if_nonfinite=True)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ((-1.0,), "max_norm = -1.0: give a number of at least 0"),
        ((math.nan,), "max_norm = nan"),
        (("much",), "max_norm = 'much'"),
        (("1",), "max_norm = '1'"),
        ((torch.ones(2),), "max_norm = tensor"),
        ((1.0, None), "norm_type = None: give the p of the p-norm"),
        ((1.0, -3), "norm_type = -3: give the p of the p-norm, 2.0 say and at least 0"),
        ((1.0, "2"), "norm_type = '2'"),
        ((1.0, math.nan), "norm_type = nan"),
    ],
)
def test_wrong_arguments(arguments: tuple[Any, ...], text: str) -> None:
    pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, CASES["plain"].loss_fn, num_ranks=2)
    with pytest.raises(ValueError, match=text):
        pipe.clip_grad_norm_(*arguments)


def test_holders_that_differ_are_refused() -> None:
    one = [(0, "a", "float32", False)]
    two = [(0, "b", "float32", True), (1, "c", "float32", False), (0, "a", "float32", False)]
    gathering = GradNorms()
    gathering.arrange([one, two])
    with pytest.raises(ValueError, match=" a .*1.5 on rank 0 but 1.25 on rank 1"):
        gathering.values(torch.tensor([1.5, 2.0, 3.0, 1.25]))
    gathering.arrange([two, [*one, (0, "b", "float32", False)]])
    values = gathering.values(torch.tensor([2.0, 3.0, 1.5, 1.5, 2.0]))
    assert [(norm.name, norm.rank) for norm in gathering.norms] == [("a", 0), ("b", 1), ("c", 0)]
    assert values.tolist() == [1.5, 2.0, 3.0]


def gathered(grads: Sequence[torch.Tensor], order: float, gathering: GradNorms | None = None) -> torch.Tensor:
    """The norm of gradients of one process."""
    gathering = gathering or GradNorms()
    held = [NamedTensor(i, str(i), grad) for i, grad in enumerate(grads)]
    values, _ = gathering.gather(lambda call, make: [make()], "clip", held, lambda: (order, {}), 60.0)
    return gathering.total(values, order, torch.device("cpu"))


def test_every_dtype_crosses_exactly() -> None:
    for dtype in (torch.float, torch.double, torch.bfloat16, torch.half, torch.complex64):
        grads = [torch.randn(7, 5).to(dtype) for _ in range(5)]
        assert same_bits(gathered(grads, 2.0), torch.nn.utils.get_total_norm(grads)), dtype


def test_names_are_gathered_where_they_have_changed() -> None:
    """What is gathered in every step is one tensor; a gradient more, or one of another dtype, is a table anew."""
    pipe = Pipeline([nn.Linear(4, 4) for _ in range(4)], "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    calls: list[tuple[str, Any]] = []
    meet = pipe._steps.all_gather
    pipe._steps.all_gather = lambda call, make: calls.append((call, replies := meet(call, make))) or replies
    x, y = torch.randn(4, 4), torch.randn(4, 4)
    pipe.step(x, target=y)
    found = [pipe.clip_grad_norm_(math.inf) for _ in range(3)]
    assert [call for call, _ in calls] == ["clip_grad_norm_", "clip_grad_norm_, names", *["clip_grad_norm_"] * 2]
    assert all("weight" not in str(replies) for call, replies in calls if "names" not in call)
    next(pipe.parameters()).grad = None
    found.append(pipe.clip_grad_norm_(math.inf))
    assert calls[-1][0] == "clip_grad_norm_, names"
    assert found[0] == found[1] == found[2] > found[3]
    assert same_bits(found[3], torch.nn.utils.get_total_norm([p.grad for p in pipe.parameters() if p.grad is not None]))
