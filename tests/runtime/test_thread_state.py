"""What torch keeps by thread is for ranks that are threads what it is for the caller."""

from contextlib import nullcontext
from contextvars import ContextVar
from threading import Thread
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

import fastpipe
from fastpipe.runtime.common import thread_state
from tests.conftest import overlap_of
from tests.forks import in_child
from tests.runtime.models import WIDTH, Block, squared

ROWS = 8


def step(schedule: str, num_ranks: int, executor: str, layers: list[nn.Module] | None = None) -> None:
    layers = [Block() for _ in range(8)] if layers is None else layers
    # overlapped, so that halves of pairs run in threads of their own
    options = {"num_ranks": num_ranks, "executor": executor, "overlap": overlap_of(executor)}
    pipe = fastpipe.Pipeline(layers, schedule, 8, squared, **options)
    pipe.step(torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH))


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_hooks_of_saved_tensors_see_all_ranks(schedule: str, executor: str) -> None:
    packed, unpacked = [0, 0], [0, 0]
    for i, num_ranks in enumerate((1, 4)):

        def pack(tensor: torch.Tensor, i: int = i) -> torch.Tensor:
            packed[i] += 1
            return tensor.clone()

        def unpack(tensor: torch.Tensor, i: int = i) -> torch.Tensor:
            unpacked[i] += 1
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            step(schedule, num_ranks, executor)
    assert packed[0] == packed[1] > 0 and unpacked[0] == unpacked[1] > 0


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_a_dispatch_mode_sees_all_ranks_and_ends_there(schedule: str, executor: str) -> None:
    layers: list[nn.Module] = [Block() for _ in range(8)]
    # F, and in the backward the weights' half and, but for the first layer's, the inputs'
    expected = 2 * ROWS * WIDTH * WIDTH * (8 * 3 - 1)
    with FlopCounterMode(display=False) as counter:
        step(schedule, 4, executor, layers)
    assert counter.get_total_flops() == expected
    step(schedule, 4, executor, layers)
    assert counter.get_total_flops() == expected


def test_a_mode_that_threads_cannot_share_is_refused(executor: str) -> None:
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        step("1f1b", 1, executor)
        with pytest.raises(ValueError, match="leave it out, or use one process for each rank"):
            step("1f1b", 2, executor)
    step("1f1b", 2, executor)


FACTOR = ContextVar("FACTOR", default=1.0)


class Scales(nn.Module):
    """Looks at a context variable in its forward."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * FACTOR.get()


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev"])
def test_context_variables_are_the_callers(schedule: str, executor: str) -> None:
    layers: list[nn.Module] = [Block(), Scales(), Block(), Scales()]
    pipe = fastpipe.Pipeline(layers, schedule, 4, squared, num_ranks=2, executor=executor)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for factor in (3.0, 5.0):
        token = FACTOR.set(factor)
        try:
            assert fastpipe.check_parity(pipe, layers, batch).ok
        finally:
            FACTOR.reset(token)


class ScaledGrad(torch.autograd.Function):
    """Looks at a context variable in its backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * FACTOR.get()


class ScalesGrad(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledGrad.apply(x)  # type: ignore[no-untyped-call, no-any-return]


def test_context_variables_are_the_callers_in_the_backwards_of_pairs(executor: str) -> None:
    layers: list[nn.Module] = [module for _ in range(4) for module in (Block(), ScalesGrad())]
    options = {"num_ranks": 2, "executor": executor, "overlap": overlap_of(executor)}
    pipe = fastpipe.Pipeline(layers, "dualpipev", 8, squared, **options)
    batch = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    for factor in (1.0, 3.0, 5.0):
        token = FACTOR.set(factor)
        try:
            assert fastpipe.check_parity(pipe, layers, batch).ok
        finally:
            FACTOR.reset(token)


class Makes(nn.Module):
    """Makes a tensor on the default device."""

    def __init__(self) -> None:
        super().__init__()
        self.devices: set[str] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.devices.add(torch.empty(1).device.type)
        return x + 1


def test_the_default_device_is_the_callers(executor: str) -> None:
    layers: list[nn.Module] = [Block(), Makes(), Makes(), Block()]
    pipe = fastpipe.Pipeline(layers, "1f1b", 2, squared, num_ranks=4, executor=executor)
    x, y = torch.randn(2, 4, WIDTH)
    for device in ("meta", "cpu"):
        with torch.device(device):
            pipe.step(x, target=y)
        for layer in layers[1:3]:
            assert isinstance(layer, Makes) and layer.devices == {device}
            layer.devices.clear()


def autocast_depth() -> int:
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


class Depths(nn.Module):
    """Notes in how many regions of autocast its forward and its backward are."""

    def __init__(self, noted: list[int]) -> None:
        super().__init__()
        self.noted = noted

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.noted.append(autocast_depth())
        made = x * 1
        made.register_hook(lambda _: self.noted.append(autocast_depth()))
        return made


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_threads_are_in_regions_of_autocast_as_the_caller(schedule: str, depth: int, executor: str) -> None:
    """The end of the outermost region drops the casts of parameters, which all threads share: a region within a layer
    must neither drop those of a forward in another thread, nor keep its own for the next region."""
    noted: list[int] = []
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), Depths(noted)) for _ in range(4)]
    options = {"num_ranks": 2, "executor": executor, "overlap": overlap_of(executor)}
    pipe = fastpipe.Pipeline(layers, schedule, 8, squared, **options)
    for _ in range(2):  # in the first one, all pairs run in order
        with torch.autocast("cpu", torch.bfloat16) if depth else nullcontext():
            pipe.step(torch.randn(ROWS, WIDTH), target=torch.randn(ROWS, WIDTH))
    assert set(noted) == {depth} and len(noted) == 2 * 2 * len(layers) * 8
    are_together = schedule == "dualpipev" and executor == "native"
    assert (pipe._steps.ranks.pair_counts()["together"] > 0) == are_together


def test_the_end_of_a_thread_keeps_the_casts_of_parameters() -> None:
    layer, x = nn.Linear(WIDTH, WIDTH), torch.randn(2, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        before = layer(x).grad_fn.next_functions[0]
        state = thread_state()

        def run() -> None:
            with state():
                layer(x)

        thread = Thread(target=run)
        thread.start()
        thread.join()
        assert layer(x).grad_fn.next_functions[0] == before
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(x).grad_fn.next_functions[0] != before


class Faked(nn.Module):
    """As a layer that torch.compile compiles in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with FakeTensorMode():
            torch.empty(1).add(1)
        return self.linear(x)


def test_layers_are_compiled_after_the_threads_of_another_pipeline_have_ended() -> None:
    """torch's CUDA build, without a GPU: torch 2.11 crashes if the guard has gone with the first thread."""

    def compile_in_threads() -> None:
        for _ in range(5):
            step("1f1b", 2, "python", [Faked() for _ in range(2)])
            kept.append([bytearray(8) for _ in range(1000)])  # in the freed memory

    kept: list[Any] = []
    assert in_child(compile_in_threads) == 0
