"""Shapes that change between steps and microbatches, what is refused, and what an evaluation leaves alone."""

from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe import Pipeline
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits
from tests.runtime.models import WIDTH, Block, squared


class Normed(nn.Module):
    """A layer with buffers that every forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(x)))


class Whimsical(Block):
    """From some step on it hands on fewer rows, though its input looks as before."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = fastpipe.current()
        assert at is not None
        return super().forward(x)[:1] if at.step > 0 and at.microbatch == 2 else super().forward(x)


def build(layers: list[nn.Module], executor: str, schedule: str = "1f1b", **options: Any) -> Pipeline:
    options = {"loss_fn": squared, **options}
    return Pipeline(layers, schedule, 4, num_ranks=2, executor=executor, **options)


def layers(make: type[nn.Module]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(4)]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipev"])
def test_batches_of_any_size_and_number(schedule: str, executor: str) -> None:
    """A smaller last batch, other numbers of microbatches, and back, each as the unsplit model has it."""
    pipe, unsplit = build(layers(Block), executor, schedule), Chain(dict(enumerate(layers(Block))))
    for rows, count in ((16, 4), (7, 4), (16, 4), (11, 6), (5, 5), (16, 4)):
        x, target = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        result = pipe.step(x, target=target, num_microbatches=count)
        reference = reference_step(unsplit, (x, target), pipe._steps.programs.schedule(count), squared)
        assert same_bits(result.loss, reference.loss)
        for parameter, other in zip(pipe.parameters(), unsplit.parameters(), strict=True):
            assert same_bits(parameter.grad, other.grad)


def laid_out(rows: int) -> dict[str, torch.Tensor]:
    """Batches of one shape, in memory in several ways."""
    wide = torch.randn(rows, 2 * WIDTH)
    return {
        "rows": torch.randn(rows, WIDTH),
        "columns": torch.randn(WIDTH, rows).t(),
        "a slice": wide[:, :WIDTH],
        "with gaps": wide[:, ::2],
        "repeated": wide[:1, :WIDTH].expand(rows, WIDTH),
    }


@pytest.mark.parametrize("rows", [4, 12])
@pytest.mark.parametrize("first", ["rows", "columns"])
def test_batches_with_other_strides(first: str, rows: int, executor: str) -> None:
    """An output is laid out like the input, and a gradient like that of the output."""
    pipe = build([nn.Tanh(), *layers(Block)[1:3], nn.Identity()], executor, loss_fn=None)
    unsplit = nn.Sequential(nn.Tanh(), *layers(Block)[1:3])
    batches = laid_out(rows)
    for name in (first, *batches, first):
        pipe.step(batches[name], output_grad=batches[name])
        for part in batches[name].tensor_split(4):
            unsplit(part).backward(part)
        for parameter, other in zip(pipe.parameters(), unsplit.parameters(), strict=True):
            assert same_bits(parameter.grad, other.grad)


class Splits(nn.Module):
    """Returns the halves of a convolution's channels: views of channels-last memory, with gaps."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3, padding=1).to(memory_format=torch.channels_last)
        self.seen = seen

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        halves = self.conv(x).chunk(2, dim=1)
        for half in halves:
            half.register_hook(self.seen.append)
        return halves


class Joins(nn.Module):
    """Concatenates channels, like the way up of a U-Net; the gradients of its inputs are such views, too."""

    def __init__(self, seen: list[torch.Tensor]) -> None:
        super().__init__()
        self.conv = nn.Conv2d(8, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.seen = seen

    def forward(self, *halves: torch.Tensor) -> torch.Tensor:
        self.seen.extend(halves)
        return self.conv(torch.cat(halves, dim=1))


def test_half_of_the_channels_stay_channels_last(executor: str) -> None:
    """As rows they would have the next convolution, and the backward of the one before, use other kernels."""
    seen: list[torch.Tensor] = []
    pipe = build([Splits(seen), Joins(seen)], executor)
    x = torch.randn(12, 4, 8, 8).to(memory_format=torch.channels_last)
    pipe.step(x, target=torch.randn(12, 4, 8, 8))
    assert len(seen) == 2 * 2 * 4  # halves and their gradients, of every microbatch
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) for tensor in seen)


class Turning(Block):
    """From some step on its output lies in memory otherwise."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = fastpipe.current()
        assert at is not None
        return super().forward(x).t().contiguous().t() if at.step > 0 else super().forward(x)


def test_other_strides_without_a_change_of_the_input_are_named(executor: str) -> None:
    pipe = build([Block(), Turning(), Block(), Block()], executor)
    x = torch.randn(16, WIDTH)
    pipe.step(x, target=x)
    with pytest.raises(ValueError, match=r"expected .*4, 6.*found .*4, 6.* with strides \(1, 4\)"):
        pipe.step(x, target=x)


def test_another_need_of_a_gradient_without_a_change_of_the_input_is_named(executor: str) -> None:
    """A first layer that is skipped in the first step."""
    layer = Block()
    pipe = build([layer, Block()], executor)
    layer.forward = lambda x: x  # type: ignore[method-assign]
    x = torch.randn(16, WIDTH)
    pipe.step(x, target=x)
    layer.forward = lambda x: Block.forward(layer, x)  # type: ignore[method-assign]
    with pytest.raises(ValueError, match="always or never require a gradient"):
        pipe.step(x, target=x)


def test_a_change_without_a_change_of_the_input_is_named(executor: str) -> None:
    pipe = build([Block(), Whimsical(), Block(), Block()], executor, loss_fn=None)
    x = torch.randn(16, WIDTH)
    grads = torch.ones(16, WIDTH)
    pipe.step(x, output_grad=grads)
    with pytest.raises(ValueError, match=r"expected .*4, 6.*found .*1, 6") as caught:
        pipe.step(x, output_grad=grads)
    text = f"{caught.value} {caught.value.__notes__}"
    assert "stage 0" in text and "microbatch 2" in text


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "dualpipev"])
def test_buffers_move_in_the_order_of_the_forwards(schedule: str, executor: str) -> None:
    pipe, unsplit = build(layers(Normed), executor, schedule), Chain(dict(enumerate(layers(Normed))))
    x = torch.randn(16, WIDTH)
    pipe.step(x, target=torch.randn(16, WIDTH))
    with torch.no_grad():
        for part in x.tensor_split(4):
            unsplit(part)
    found = {k: v for m in pipe.stage_modules.values() for k, v in m.named_buffers()}
    assert found and all(same_bits(buffer, found[name]) for name, buffer in unsplit.named_buffers())


def test_an_evaluation_between_backward_and_optimizer(executor: str) -> None:
    pipe = build(layers(Normed), executor)
    x, target = torch.randn(16, WIDTH), torch.randn(16, WIDTH)
    pipe.step(x, target=target)
    before = [p.grad.clone() for p in pipe.parameters()]
    buffers = {k: v.clone() for m in pipe.stage_modules.values() for k, v in m.named_buffers()}
    pipe.eval()
    assert pipe.eval_step(x, target=target, num_microbatches=3).loss is not None
    result = pipe.eval_step(x)
    assert result.loss is None and result.losses is None and not result.outputs.requires_grad
    pipe.train()
    assert all(map(same_bits, before, [p.grad for p in pipe.parameters()]))
    assert all(same_bits(v, buffers[k]) for m in pipe.stage_modules.values() for k, v in m.named_buffers())
    assert all(not stage._records and not stage.work.outputs for stage in pipe._steps.stages)


@pytest.mark.parametrize("count", [1, 3, 5])
@pytest.mark.parametrize("schedule", ["dualpipev", "dualpipe", "interleaved_1f1b"])
def test_an_evaluation_takes_any_number_of_microbatches(schedule: str, count: int) -> None:
    pipe, unsplit = build(layers(Block), "auto", schedule), nn.Sequential(*layers(Block))
    x = torch.randn(16, WIDTH)
    with torch.no_grad():
        expected = torch.cat([unsplit(part) for part in x.tensor_split(count)])
    assert same_bits(pipe.eval_step(x, num_microbatches=count).outputs, expected)
