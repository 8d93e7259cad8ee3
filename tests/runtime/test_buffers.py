"""Buffers are kept while something is tried, however a module changes them."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from fastpipe.runtime.common.modules import keep_buffers


class Replaces(nn.Module):
    """A forward that makes its buffer anew, as a running mean is often written."""

    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Expanded(nn.Module):
    """A buffer whose elements share memory; the forward writes to one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(1, 3).expand(2, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean[0] += x.mean(0)
        return x - self.mean[1]


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
@pytest.mark.parametrize("scripted", [False, True])
@pytest.mark.parametrize("make", [Replaces, lambda: nn.BatchNorm1d(3), Expanded])
def test_what_was_there_is_put_back(make: Callable[[], nn.Module], scripted: bool) -> None:
    module: nn.Module = torch.jit.script(make()) if scripted else make()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    put_back = keep_buffers([module])
    for _ in range(2):
        module(torch.randn(4, 3))
        assert not all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        put_back()
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
