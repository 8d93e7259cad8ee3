"""Models for the split backward: what linears are used through, around and beside."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from tests.runtime import tree_models

WIDTH = 8


class WithLinear(tree_models.WithLinear):
    """As wide as the others here."""

    width = WIDTH


class Mlp(nn.Module):
    """Two linears, one without a bias, and a norm before them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Attention(nn.Module):
    """Pre-norm attention with a packed projection, by `F.linear` itself."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Parameter(torch.randn(3 * WIDTH, WIDTH) / 3)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = F.linear(self.norm(x), self.qkv).unflatten(-1, (3, 2, WIDTH // 2)).movedim(-3, 0).transpose(-2, -3)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(-2, -3).flatten(-2))


class TorchAttention(nn.Module):
    """torch's own attention, which hands its weights to one function."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return x + self.attention(y, y, y, need_weights=False)[0]


class Transformer(nn.Module):
    """A small pre-norm block."""

    def __init__(self, attention: Callable[[], nn.Module] = Attention) -> None:
        super().__init__()
        self.attention = attention()
        self.mlp = Mlp()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.attention(x))


class Checkpointed(nn.Module):
    """Recomputed in the backward; counts its forwards."""

    def __init__(self, inner: nn.Module, reentrant: bool) -> None:
        super().__init__()
        self.inner = inner
        self.reentrant = reentrant
        self.calls = 0

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(self._run, x, use_reentrant=self.reentrant)
        assert isinstance(y, torch.Tensor)
        return y


class Thrice(WithLinear):
    """One weight in three linears, so that the order of their sum shows."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = torch.tanh(self.linear(x)) + x
        return x


class Twice(Thrice):
    """And another weight in a linear and a product."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return self.shared(x) + x @ self.shared.weight


class Parametrised(nn.Module):
    """A weight that is computed from two parameters, at every use anew."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(torch.tanh(self.linear(x)))


class Convolved(nn.Module):
    """A convolution between linears; it stays in I."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.conv = nn.Conv1d(5, 5, 3, padding=1)
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.conv(self.first(x))))


class Frozen(nn.Module):
    """A linear without gradients, one whose bias alone has one, and a forward without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.second = nn.Linear(WIDTH, WIDTH)
        self.second.weight.requires_grad_(False)
        self.third = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            scale = torch.sigmoid(self.third(x)).mean()
        return self.third(self.second(self.first(x))) * scale + x


class Made(nn.Module):
    """A weight that a linear makes of the input: its gradient is the input's and can not wait; the maker's can."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(torch.tanh(x.detach()), self.maker(x).flatten(0, -2)[:WIDTH]) + x


class Strided(nn.Module):
    """Inputs of four dimensions, strided ones, a transposed weight, a leading dimension of one."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)
        self.mixing = nn.Linear(5, 5)
        self.plain = nn.Linear(5, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x[:, None]).squeeze(1) + F.linear(x, self.other.t())
        return self.plain(torch.tanh(self.mixing(x.transpose(1, 2)))).transpose(1, 2) + x


class Channels(WithLinear):
    """Takes a contiguous input of four dimensions, and gets a gradient whose channels come first, as in ConvNeXt."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x.repeat(1, 4, 1).unflatten(1, (4, 5))).permute(0, 3, 1, 2)
        return x + torch.tanh(y.contiguous()).mean(2).transpose(1, 2)


class Own(torch.autograd.Function):
    """A recompute of somebody's own, which asks its graph for the gradients one by one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return torch.tanh(F.linear(x, weight))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        inputs = [t.detach().requires_grad_() for t in ctx.saved_tensors]
        with torch.enable_grad():
            output = torch.tanh(F.linear(*inputs))
        return torch.autograd.grad(output, inputs, grads)


class TwoLinears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH)


class OwnFunction(TwoLinears):
    """Linears around a function of the user's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = Own.apply(self.first(x), self.last.weight)
        return self.last(y)


class Cut(nn.Module):
    """A linear with nothing but its weight to train."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x.detach()) + x


class Slopes(TwoLinears):
    """Asks for gradients within the forward: of an input, and of a weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        apart = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(torch.tanh(self.first(apart)).sum(), apart)
        (part,) = torch.autograd.grad(self.last(apart).sum(), self.last.weight)
        return self.last(self.first(x) + slope) * part.mean()


class OneDimension(nn.Module):
    """Linears of single rows, and of one activation by another."""

    def __init__(self) -> None:
        super().__init__()
        self.alone = nn.Linear(WIDTH, WIDTH)
        self.also = nn.Parameter(torch.randn(WIDTH, WIDTH) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.linear(x, self.also) + self.alone(x[0, 0]) + F.linear(x[0, 1], self.also)
        return x + F.linear(torch.tanh(x), torch.tanh(x).flatten(0, -2)[:WIDTH])


class Maker(nn.Module):
    """A weight that linears make of another weight, and that they are used with, too."""

    def __init__(self, recompute: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.maker = nn.Linear(WIDTH, WIDTH, bias=False)
        self.second = nn.Linear(WIDTH, WIDTH, bias=False)
        self.recompute = recompute
        self.register_buffer("code", torch.randn(WIDTH, WIDTH))

    def _make(self, code: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.second(torch.tanh(self.maker(code))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        code = self.code.clone().requires_grad_()
        weight = self._make(code) if self.recompute is None else self.recompute(self._make, code)
        return x + self.maker(x) + F.linear(torch.tanh(x), weight) + F.linear(x, self.maker(self.code))


class Around(nn.Module):
    """A parametrised linear before and after a block."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(self.inner(torch.tanh(self.linear(x)))))


class Adapted(WithLinear):
    """Takes a step of its own with a copy of its weight, at every forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.linear.weight.detach().requires_grad_()
        (grad,) = torch.autograd.grad(F.linear(x.detach(), weight).square().mean(), weight)
        return F.linear(x, self.linear.weight - 0.1 * grad, self.linear.bias)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "transformer": Transformer,
    "torch_attention": lambda: Transformer(TorchAttention),
    "checkpointed": lambda: Checkpointed(Transformer(), reentrant=False),
    "checkpointed_reentrant": lambda: Checkpointed(Transformer(), reentrant=True),
    "reentrant_thrice": lambda: Checkpointed(Thrice(), reentrant=True),
    "checkpointed_twice": lambda: Checkpointed(Twice(), reentrant=False),
    "twice": Twice,
    "weight_norm": Parametrised,
    "convolution": Convolved,
    "frozen": Frozen,
    "made": Made,
    "strided": Strided,
    "channels": Channels,
    "cut": Cut,
    "slopes": Slopes,
    "own_function": OwnFunction,
    "one_dimension": OneDimension,
    "maker": Maker,
    "maker_checkpointed": lambda: Maker(functools.partial(checkpoint, use_reentrant=False)),
    "maker_reentrant": lambda: Maker(functools.partial(checkpoint, use_reentrant=True)),
    "made_reentrant": lambda: Checkpointed(Made(), reentrant=True),
    "around_reentrant": lambda: Around(Checkpointed(Mlp(), reentrant=True)),
    "adapted": Adapted,
}


def squared(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def layers_of(make: Callable[[], nn.Module], count: int) -> list[nn.Module]:
    torch.manual_seed(3)
    return [make() for _ in range(count)]


def batch_of(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(5)
    return torch.randn(rows, 5, WIDTH), torch.randn(rows, 5, WIDTH)
