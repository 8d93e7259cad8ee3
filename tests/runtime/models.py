"""Models that are small and awkward: each case is a list of layers, its batches, and how they are cut.

What crosses a boundary is what the cases are about: gradients or none, one tensor or several, odd strides, the very
input, nothing that requires a gradient. They serve the tests of one process and those of several.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from torch.utils.checkpoint import checkpoint

from fastpipe import add_loss
from fastpipe.runtime.step.microbatch import Rules
from tests.runtime.tree_models import BytesFirst, OneDict, Tree, WithLinear, decoder, u_net

WIDTH = 6
DEVICE = torch.device(os.environ.get("FASTPIPE_TEST_DEVICE", "cpu"))
"""Where the cases are; they are made on the host."""


class Block(nn.Module):
    """A layer whose sums are long enough that their order shows in the last bits."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + 0.5 * x


class Balanced(nn.Module):
    """Adds two losses of its own, as a mixture of experts does; one of them is computed beside what it hands on.

    Args:
        recomputes: whether all of it is in a checkpoint.
    """

    def __init__(self, recomputes: bool = False) -> None:
        super().__init__()
        self.block = Block()
        self.router = nn.Linear(WIDTH, 3)
        self.recomputes = recomputes

    def body(self, x: torch.Tensor) -> torch.Tensor:
        share = torch.softmax(self.router(x), dim=-1).mean(dim=0)
        add_loss(0.1 * (share * share).sum(), "balance")
        y = self.block(x)
        add_loss(0.01 * y.square().mean(), "size")
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = checkpoint(self.body, x, use_reentrant=False) if self.recomputes else self.body(x)
        return out


class Embed(nn.Module):
    """Integers in, floats out."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.table(tokens)


class Masked(WithLinear):
    """Hands on what it computes, and beside it what needs no gradient: a mask, positions, weights."""

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor, position: torch.Tensor, weight: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        x = torch.where(mask, self.linear(x) * weight, x) + 0.1 * position[:, None]
        return x, mask, position + 1, weight


class First(nn.Module):
    """The first of its arguments."""

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return x


class Two(nn.Module):
    """Two streams; both need gradients, and the first is used in both."""

    def __init__(self, returns: type = tuple) -> None:
        super().__init__()
        self.left = nn.Linear(WIDTH, WIDTH)
        self.right = nn.Linear(WIDTH, WIDTH)
        self.returns = returns

    def forward(self, a: torch.Tensor, b: torch.Tensor | None = None) -> Any:
        b = a if b is None else b
        return self.returns((torch.tanh(self.left(a)), self.right(b) * a))


class Same(nn.Module):
    """Hands the same tensor on twice."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(x if other is None else x + 0.3 * other)
        return x, x


class Scaled(nn.Module):
    """Takes keyword arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor, offset: float = 0.0) -> torch.Tensor:
        return self.block(x) * scale + offset


class Turned(nn.Module):
    """Hands on a transposed view, so that strides cross the boundary; the next one turns it back."""

    def __init__(self, back: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.back = back

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.transpose(1, 2) if self.back else x
        x = torch.tanh(self.linear(x))
        return x if self.back else x.transpose(1, 2)


class Gappy(nn.Module):
    """Hands on a view with gaps, one with a stride of 0, a scalar, and an empty tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, 2 * WIDTH)

    def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if rest:
            repeated, scalar, empty = rest
            x = x * repeated + scalar + empty.sum()
        y = torch.tanh(self.linear(x))
        return y[:, ::2], y[:, :1].expand(-1, WIDTH), y.mean(), y[:0]


class InPlace(WithLinear):
    """Changes its input, as `nn.ReLU(inplace=True)` does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.mul_(0.9).relu_())


class Picture(nn.Module):
    """A convolution over channels-last memory."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.conv(x.contiguous(memory_format=torch.channels_last)))


class Ignores(nn.Module):
    """Gets two tensors that need gradients and uses one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: torch.Tensor, unused: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.block(x)
        return x, 2 * x


def frozen(module: nn.Module) -> nn.Module:
    """The module without gradients."""
    return module.requires_grad_(False)


def squared(output: Any, target: torch.Tensor) -> torch.Tensor:
    """A loss over the first tensor of an output."""
    first = output if isinstance(output, torch.Tensor) else output[0]
    return nn.functional.mse_loss(first, target)


def measured(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss with metrics of several kinds."""
    wrong = (output - target).abs()
    metrics = {"error": wrong.mean(), "hits": (wrong < 0.5).sum(), "rows": len(output), "by_column": wrong.sum(dim=0)}
    return squared(output, target), metrics


@dataclass(frozen=True)
class Batch:
    """One batch: arguments, keyword arguments, target."""

    args: tuple[Any, ...]
    target: Any
    kwargs: dict[str, Any] = field(default_factory=dict)


def _rows(rows: int, *shape: int) -> torch.Tensor:
    return torch.randn(rows, *shape)


def _plain(rows: int) -> Batch:
    return Batch((_rows(rows, WIDTH),), _rows(rows, WIDTH))


def _with_gradient(rows: int) -> Batch:
    return Batch((_rows(rows, WIDTH).requires_grad_(),), _rows(rows, WIDTH))


def _masked(rows: int) -> Batch:
    weight = torch.rand(rows, WIDTH, dtype=torch.float32)
    args = (_rows(rows, WIDTH), torch.rand(rows, WIDTH) > 0.3, torch.arange(rows), weight)
    return Batch(args, _rows(rows, WIDTH))


def _keywords(rows: int) -> Batch:
    return Batch((_rows(rows, WIDTH),), _rows(rows, WIDTH), {"scale": torch.rand(rows, 1) + 0.5, "offset": 0.25})


@contextlib.contextmanager
def _numbers_from(seed: int) -> Iterator[None]:
    """Random numbers of the host from a seed. `torch.manual_seed` walks the whole stack for devices that are not there,
    which under pytest is a long one."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        yield


def _on_device(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.device == DEVICE:
        return tensor
    return tensor.detach().to(DEVICE).requires_grad_(tensor.requires_grad)


@dataclass(frozen=True)
class Case:
    """A model and its batches.

    Attributes:
        make: the layers, `num_layers` of them, new at every call.
        batch: a batch of so many rows.
        loss_fn: its loss.
        split: how its arguments are cut.
    """

    make: Callable[[int], list[nn.Module]]
    batch: Callable[[int], Batch] = _plain
    loss_fn: Callable[[Any, Any], Any] = squared
    split: Rules = None

    def layers(self, num_layers: int) -> list[nn.Module]:
        """The same layers at every call, in memory of their own."""
        with _numbers_from(7):
            return [layer.to(DEVICE) for layer in self.make(num_layers)]

    def batches(self, steps: int, rows: int) -> list[Batch]:
        """The same batches at every call."""
        with _numbers_from(11):
            made = [self.batch(rows) for _ in range(steps)]
        return [Batch(*tree_map_only(torch.Tensor, _on_device, tuple(vars(batch).values()))) for batch in made]


def _each(make: Callable[[], nn.Module]) -> Callable[[int], list[nn.Module]]:
    return lambda n: [make() for _ in range(n)]


def _squared_hidden(output: Any, target: torch.Tensor) -> torch.Tensor:
    return squared(output["hidden"], target)


def _turned(n: int) -> list[nn.Module]:
    return [Turned(back=bool(i % 2)) for i in range(n - n % 2)] + [Block() for _ in range(n % 2)]


def _half_identity(n: int) -> list[nn.Module]:
    return [Block() if i % 2 else nn.Identity() for i in range(n)]


def _frozen(n: int, which: Callable[[int], bool]) -> list[nn.Module]:
    return [frozen(Block()) if which(i) else Block() for i in range(n)]


CASES: dict[str, Case] = {
    "plain": Case(_each(Block)),
    "added_losses": Case(lambda n: [Balanced() if i % 3 != 1 else Block() for i in range(n)]),
    "added_and_recomputed": Case(_each(lambda: Balanced(recomputes=True))),
    "metrics": Case(_each(Block), loss_fn=measured),
    "input_with_gradient": Case(_each(Block), _with_gradient),
    "tokens": Case(
        lambda n: [Embed(), *(Block() for _ in range(n - 1))],
        lambda rows: Batch((torch.randint(11, (rows, 3)),), _rows(rows, 3, WIDTH)),
    ),
    "mask_beside": Case(lambda n: [Masked() for _ in range(n)], _masked),
    "two_tensors": Case(_each(Two)),
    "list_of_two": Case(lambda n: [Two(tuple) for _ in range(n)]),
    "same_twice": Case(_each(Same)),
    "keywords": Case(lambda n: [Scaled() if i % 2 else Block() for i in range(n)], _keywords),
    "identity": Case(_half_identity),
    "transposed": Case(_turned, lambda rows: Batch((_rows(rows, 5, WIDTH),), _rows(rows, 5, WIDTH))),
    "gaps": Case(_each(Gappy)),
    "in_place": Case(lambda n: [nn.Linear(WIDTH, WIDTH), *(InPlace() for _ in range(n - 1))]),
    "channels_last": Case(_each(Picture), lambda rows: Batch((_rows(rows, 4, 3, 5),), _rows(rows, 4, 3, 5))),
    "unused": Case(_each(Ignores)),
    "frozen_first": Case(lambda n: _frozen(n, lambda i: i < n // 2)),
    "frozen_last": Case(lambda n: _frozen(n, lambda i: i >= n // 2)),
    "frozen_but_one": Case(lambda n: _frozen(n, lambda i: i != 1)),
    "tree": Case(_each(Tree)),
    "one_dict": Case(_each(OneDict), loss_fn=_squared_hidden),
    "bytes_first": Case(_each(BytesFirst), loss_fn=lambda output, target: squared(output[1], target)),
    "carried": Case(lambda n: decoder(n, Block)),
    "u_net": Case(lambda n: u_net(n, Block)),
    "double": Case(
        lambda n: [Block().double() for _ in range(n)],
        lambda rows: Batch((_rows(rows, WIDTH).double(),), _rows(rows, WIDTH).double()),
    ),
    "bfloat16": Case(
        lambda n: [Block().bfloat16() for _ in range(n)],
        lambda rows: Batch((_rows(rows, WIDTH).bfloat16(),), _rows(rows, WIDTH).bfloat16()),
    ),
}
