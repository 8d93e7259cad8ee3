"""What it costs to reach the linear that leaves its weight for W: by the override of aten::linear, or by scoped ways.

python benchmarks/linear_override.py

A call of an `nn.Linear` of 16 by 16 on 8 rows, so that the host's time is all there is, with gradients on. In every way
but "plain" and "dispatch mode" the same native kernel runs in the end, so what differs is the way to it:

* plain: nothing is armed;
* override: the thread is armed, and the kernel under ``aten::linear`` sees it;
* function mode: a `TorchFunctionMode` around the forward that hands on what it is given;
* dispatch mode: a `TorchDispatchMode` that does. It is below autograd, where no linear is seen any more, so that it
  could not leave another node in the graph: only its price is of interest;
* module: a ``forward`` of its own on every `nn.Linear`, put there before a stage's forward, and taken off after it.

"Other" is a GELU of the same size, which every mode sees too. Rounds are interleaved; medians of the thread's
processor time, with quartiles. A round is short, so that most see nothing of other work on the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from tables import machine, parser, spread, table
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from fastpipe.runtime import native

WIDTH, ROWS, CALLS = 16, 8, 10
Call = Callable[[nn.Linear], Any]


class FunctionMode(TorchFunctionMode):
    """Hands on what it is given."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


class DispatchMode(TorchDispatchMode):
    """The same below autograd."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextmanager
def own_forwards(layers: list[nn.Linear]) -> Iterator[None]:
    """A forward on every layer, one stage's forward long."""

    def forward(layer: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, layer.weight, layer.bias)

    for layer in layers:
        vars(layer)["forward"] = partial(forward, layer)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def microseconds(call: Call, layers: list[nn.Linear], around: AbstractContextManager[Any]) -> float:
    """For each call, with what is done around the calls."""
    start = time.perf_counter()
    with around:
        for layer in layers:
            call(layer)
    return (time.perf_counter() - start) / len(layers) * 1e6


def main() -> None:
    """Measure, and print a table."""
    options = parser(__doc__, rounds=4000).parse_args()
    runtime: Any = native.load()
    if runtime is None:
        raise SystemExit(native.native_status())
    torch.set_num_threads(1)
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(CALLS)]
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    ways: Mapping[str, tuple[bool, Callable[[], AbstractContextManager[Any]]]] = {
        "plain": (False, nullcontext),
        "override": (True, nullcontext),
        "function mode": (True, FunctionMode),
        "dispatch mode": (False, DispatchMode),
        "module": (True, lambda: own_forwards(layers)),
    }
    calls: Mapping[str, Call] = {"linear": lambda layer: layer(x), "other": lambda _: F.gelu(x)}
    found: dict[tuple[str, str], list[float]] = {(way, call): [] for way in ways for call in calls}
    for _ in range(options.rounds):
        for (way, call), times in found.items():
            armed, around = ways[way]
            weights = runtime.WeightGradients(False)
            with weights.armed(False) if armed else nullcontext():
                times.append(microseconds(calls[call], layers, around()))
            weights.clear()
    print(machine())
    rows = [[way, *(spread(found[way, call], digits=2) for call in calls)] for way in ways]
    print(table(["us a call", *calls], rows, markdown=options.markdown))


if __name__ == "__main__":
    main()
