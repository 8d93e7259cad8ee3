"""Mixed precision: autocast, one loss scale for all ranks, gradients summed in fp32."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import GradScaler, Pipeline, check_parity
from fastpipe.testing import reference_step
from tests.conftest import executors_in_turn, overlap_of
from tests.runtime.checks import assert_same, reference_of, rows_for, same_bits, unequal
from tests.runtime.models import CASES, WIDTH, Balanced, Block, Case, squared
from tests.runtime.test_losses import TWO, grads, whole

HALVES = [torch.bfloat16, torch.float16]


def in_float(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.mse_loss(output.float(), target)


AMP = Case(lambda n: [Balanced(recomputes=i % 3 == 2) if i % 2 else Block() for i in range(n)], loss_fn=in_float)


@executors_in_turn(
    "half, schedule", itertools.product([0, 1], ["1f1b", "interleaved_zb", "dualpipev", "dualpipe", "1f1b_overlap"])
)
def test_autocast_reaches_every_thread(half: int, schedule: str, executor: str) -> None:
    dtype, recompute = HALVES[half], ["none", "full"][half]
    unsplit = whole(AMP, 8)
    options = {"num_ranks": 2, "executor": executor, "overlap": overlap_of(executor), "recompute": recompute}
    pipe = Pipeline(AMP.layers(8), schedule, 8, in_float, **options)
    for batch in AMP.batches(2, rows_for(8)):
        with torch.autocast("cpu", dtype=dtype):
            result = pipe.step(*batch.args, target=batch.target)
            reference = reference_of(unsplit, batch, pipe, AMP)
        assert_same(pipe, result, unsplit, reference)
    plain = whole(AMP, 8)
    reference_of(plain, AMP.batches(1, rows_for(8))[0], pipe, AMP)
    assert not all(same_bits(a, b) for a, b in zip(grads(plain), grads(unsplit), strict=True))


class InFloat(nn.Bilinear):
    """Its operators have no autocast, but those of their backward do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x, x)


@executors_in_turn("schedule", ["1f1b", "zbv", "dualpipev"])
def test_autocast_does_not_reach_the_backward(schedule: str, executor: str) -> None:
    layers, x, target = [InFloat(4, 4, 4) for _ in range(4)], torch.randn(16, 4), torch.randn(16, 4)
    pipe = Pipeline(layers, schedule, 8, nn.functional.mse_loss, num_ranks=2, executor=executor)
    with torch.autocast("cpu", torch.bfloat16):
        pipe.step(x, target=target)
        assert check_parity(pipe, layers, (x, target)).ok
    found, model = grads(nn.Sequential(*layers)), nn.Sequential(*layers)
    model.zero_grad()
    for part, wanted in zip(x.chunk(8), target.chunk(8), strict=True):
        with torch.autocast("cpu", torch.bfloat16):
            loss = nn.functional.mse_loss(model(part), wanted) / 8
        loss.backward()
    assert all(map(same_bits, found, grads(model)))


@executors_in_turn("schedule, num_ranks, num_microbatches", TWO)
def test_the_scale_is_in_every_backward(schedule: str, num_ranks: int, num_microbatches: int, executor: str) -> None:
    case = CASES["added_losses"]
    layers = case.layers(2 * num_ranks * 2 + 1)
    unsplit, batch = copy.deepcopy(layers), case.batches(1, rows_for(num_microbatches))[0]
    pipe = Pipeline(layers, schedule, num_microbatches, squared, num_ranks=num_ranks, executor=executor)
    scaler = GradScaler(pipe, init_scale=3.0)
    result = pipe.step(*batch.args, target=batch.target)
    model = nn.Sequential(*unsplit)
    pair = (batch.args, batch.target)
    reference = reference_step(model, pair, pipe.schedule, squared, loss_scale=torch.tensor(3.0))
    assert_same(pipe, result, model, reference)
    model.zero_grad()
    once = reference_step(model, pair, pipe.schedule, squared)
    assert same_bits(once.loss, result.loss)
    torch.testing.assert_close([p.grad for p in pipe.parameters()], [3 * grad for grad in grads(model)])
    assert check_parity(pipe, layers, pair).ok
    assert scaler.get_scale() == 3.0


def test_the_scale_is_in_the_gradients_of_outputs(executor: str) -> None:
    x, grad = torch.randn(8, WIDTH), torch.randn(8, WIDTH)
    layers = [Balanced() for _ in range(4)]
    found = []
    for scaled in (False, True):
        pipe = Pipeline(copy.deepcopy(layers), "zb_h1", 4, num_ranks=2, executor=executor)
        scaler = GradScaler(pipe, init_scale=4.0, enabled=scaled)
        pipe.step(x, output_grad=grad)
        found.append([p.grad for p in pipe.parameters()])
        assert scaler.is_enabled() == scaled
        assert not GradScaler(
            pipe, growth_factor=1.0, enabled=False
        ).is_enabled()  # factors matter if enabled, as in torch
    assert all(same_bits(4 * plain, scaled) for plain, scaled in zip(*found, strict=True))


@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_training_in_fp16_is_that_of_the_unsplit_model(schedule: str, executor: str) -> None:
    """With a first scale that overflows: the same steps are skipped, the scale is the same, and so are the weights."""
    case = Case(lambda n: [Block() for _ in range(n)], loss_fn=in_float)
    unsplit = whole(case, 8)
    pipe = Pipeline(case.layers(8), schedule, 4, in_float, num_ranks=2, executor=executor)
    ours, theirs = (torch.optim.AdamW(p.parameters(), lr=0.01) for p in (pipe, unsplit))
    options = {"init_scale": 2.0**24, "growth_interval": 2}
    scaler, plain = GradScaler(pipe, **options), torch.amp.GradScaler("cpu", **options)
    scales, skipped = [], 0
    for batch in case.batches(12, rows_for(4)):
        before = [p.detach().clone() for p in pipe.parameters()]
        with torch.autocast("cpu", dtype=torch.float16):
            pipe.step(*batch.args, target=batch.target)
            reference_of(unsplit, batch, pipe, case, loss_scale=plain.scale(torch.ones(())))
        for optimizer, one in ((ours, scaler), (theirs, plain)):
            one.unscale_(optimizer)
        pipe.clip_grad_norm_(1.0)
        torch.nn.utils.clip_grad_norm_(unsplit.parameters(), 1.0)
        for optimizer, one in ((ours, scaler), (theirs, plain)):
            one.step(optimizer)
            one.update()
            optimizer.zero_grad()
        skipped += all(map(torch.equal, before, pipe.parameters()))
        assert scaler.get_scale() == plain.get_scale()
        scales.append(scaler.get_scale())
        assert all(same_bits(a, b) for a, b in zip(pipe.parameters(), unsplit.parameters(), strict=True))
    assert 0 < skipped < 10 and min(scales) < scales[-1]


def test_a_scaler_that_is_not_enabled_does_nothing(executor: str) -> None:
    batch = CASES["plain"].batches(1, 9)[0]
    found = []
    for make in (lambda pipe: None, lambda pipe: GradScaler(pipe, enabled=False)):
        pipe = Pipeline(CASES["plain"].layers(4), "1f1b", 4, squared, num_ranks=2, executor=executor)
        scaler = make(pipe)
        pipe.step(*batch.args, target=batch.target)
        found.append([p.grad for p in pipe.parameters()])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler.step(optimizer)
    scaler.update()
    assert scaler.get_scale() == 1.0


BF16 = CASES["bfloat16"]


@executors_in_turn("schedule, num_ranks, num_microbatches", TWO)
def test_gradients_in_fp32(schedule: str, num_ranks: int, num_microbatches: int, executor: str) -> None:
    count = 4 * num_ranks + 1
    unsplit = whole(BF16, count)
    options = {"num_ranks": num_ranks, "executor": executor, "grad_dtype": torch.float32}
    pipe = Pipeline(BF16.layers(count), schedule, num_microbatches, squared, **options)
    for batch in BF16.batches(2, rows_for(num_microbatches)):
        result = pipe.step(*batch.args, target=batch.target)
        reference = reference_of(unsplit, batch, pipe, BF16, grad_dtype=torch.float32)
        assert_same(pipe, result, unsplit, reference)
    assert {p.grad.dtype for p in pipe.parameters()} == {torch.float32}
    assert {p.dtype for p in pipe.parameters()} == {torch.bfloat16}
    norm = pipe.clip_grad_norm_(0.01)
    assert same_bits(norm, torch.nn.utils.clip_grad_norm_(unsplit.parameters(), 0.01)) and norm.dtype is torch.float32
    assert not unequal(pipe, unsplit)


def test_the_sum_of_microbatches_is_nearer_in_fp32(executor: str) -> None:
    """Of 64 microbatches, against the sum in fp64 of what each of them gives."""
    case = Case(lambda n: [Block().bfloat16() for _ in range(n)], BF16.batch)
    batch, count = case.batches(1, 64)[0], 64
    gaps = []
    for dtype in (None, torch.float32):
        pipe = Pipeline(case.layers(2), "1f1b", count, squared, num_ranks=2, executor=executor, grad_dtype=dtype)
        pipe.step(*batch.args, target=batch.target)
        model = whole(case, 2)
        exact = [torch.zeros_like(p, dtype=torch.float64) for p in model.parameters()]
        for x, y in zip(batch.args[0].tensor_split(count), batch.target.tensor_split(count), strict=True):
            (squared(model(x), y) / count).backward()
            for total, p in zip(exact, model.parameters(), strict=True):
                total += p.grad
                p.grad = None
        pairs = zip(pipe.parameters(), exact, strict=True)
        gaps.append(sum(float((p.grad.double() - total).norm()) for p, total in pairs))
    assert gaps[1] < 0.01 * gaps[0]


def test_gradients_that_are_there_become_fp32() -> None:
    layers = BF16.layers(2)
    layers[0].linear.weight.grad = torch.ones(WIDTH, WIDTH).bfloat16()
    pipe = Pipeline(layers, "1f1b", 4, squared, num_ranks=2, grad_dtype=torch.float32)
    assert same_bits(layers[0].linear.weight.grad, torch.ones(WIDTH, WIDTH))
    batch = BF16.batches(1, 9)[0]
    assert check_parity(pipe, BF16.layers(2), (batch.args, batch.target)).ok


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adafactor, torch.optim.RMSprop])
def test_optimizers_that_take_them(optimizer: Any) -> None:
    pipe = Pipeline(BF16.layers(4), "dualpipe", 4, squared, num_ranks=2, grad_dtype=torch.float32)
    made = optimizer(pipe.parameters(), lr=0.01)
    losses = []
    batch = BF16.batches(1, 9)[0]
    for _ in range(5):
        losses.append(float(pipe.step(*batch.args, target=batch.target).loss))
        made.step()
        made.zero_grad()
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("given", ["float32", torch.int64, 32])
def test_what_is_no_dtype_of_gradients(given: Any) -> None:
    with pytest.raises(ValueError, match="grad_dtype = .*: give a floating-point dtype"):
        Pipeline(BF16.layers(2), "1f1b", 4, squared, num_ranks=2, grad_dtype=given)


def test_a_scaler_before_the_first_step() -> None:
    pipe = Pipeline([nn.Linear(4, 4), nn.Linear(4, 4)], "1f1b", 2, nn.functional.mse_loss, num_ranks=2)
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    scaler = GradScaler(pipe, init_scale=8.0)
    assert scaler.get_scale() == 8.0
    scaler.step(optimizer)
    scaler.update()
    pipe.step(torch.ones(4, 4), target=torch.ones(4, 4))
    scaler.step(optimizer)


def test_a_scaler_of_no_pipeline_is_refused() -> None:
    with pytest.raises(TypeError, match="pipe: expected a Pipeline, found Linear"):
        GradScaler(nn.Linear(4, 4))  # type: ignore[arg-type]
