"""Torch's default generators while stages compute: who uses them, one after the other, and from which state.

There is one default generator a device for the whole process. A stage that draws moves it; a checkpoint that recomputes
sets it back to what it was in F, draws, and restores it. Between two threads, ranks or an overlapped pair, that mixes
up both: the mask of the recompute is then not that of F, and gradients are wrong, silently. So such actions are
regions that exclude each other. What stages do is found out by `fastpipe.runtime.random_numbers`; the native executor
has the same in ``csrc/torch/random_numbers.h``.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import get_gradient_edge

from fastpipe.runtime import native

_WORD = 2**64 - 1

States = list[torch.Tensor]


def microbatch_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """What the generators are seeded with for one stage and microbatch: 64 bits, the same on every machine.

    The three numbers are added one by one, each spread over all bits by the increment of splitmix64 (Steele, Lea and
    Flood 2014) and then mixed by its finalizer. Torch's generator on a CPU uses the lower 32 bits.
    """
    mixed = seed & _WORD
    for number in (step, stage, microbatch):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (number + 1)) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        mixed ^= mixed >> 31
    return mixed


def default_generators(device: torch.device) -> list[torch.Generator]:
    """The generators that a stage on this device draws from unless it has its own: the CPU's, and the device's."""
    found = [torch.default_generator]
    if device.type != "cpu":
        module = torch.get_device_module(device)
        index = module.current_device() if device.index is None else device.index
        found.append(module.default_generators[index])
    return found


class GeneratorsLock:
    """The lock of this process's default generators, where there is no extension."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holder: int | None = None

    def __enter__(self) -> None:
        self._lock.acquire()
        self._holder = threading.get_ident()

    def __exit__(self, *error: object) -> None:
        self._holder = None
        self._lock.release()

    def held_here(self) -> bool:
        """Whether this thread is in one of its regions."""
        return self._holder == threading.get_ident()


_python_lock = GeneratorsLock()


def generators_lock() -> GeneratorsLock:
    """The lock of this process's default generators; the native executor's own where there is one."""
    runtime: Any = native.load()
    if runtime is None:
        return _python_lock
    lock: GeneratorsLock = runtime.GeneratorsLock()
    return lock


class Generators:
    """The default generators during the steps of one pipeline.

    Args:
        device: what the stages compute on.
        seed: where every F starts from a state of its own, what these are derived from.
    """

    def __init__(self, device: torch.device, seed: int | None) -> None:
        self.seed = seed
        self.generators = default_generators(device)
        self.lock = generators_lock()
        self.step = 0
        self.moved_elsewhere = False
        self._expected: States = []

    def begin(self, step: int) -> None:
        """A step begins; its number is a part of the seeds."""
        self.step = step
        self.moved_elsewhere = False
        self._expected = self.states()

    def end(self) -> bool:
        """Whether numbers were drawn in this step outside of all regions."""
        return self.moved_elsewhere or not same_states(self.states(), self._expected)

    def states(self) -> States:
        """The state of each generator."""
        return [generator.get_state() for generator in self.generators]

    @contextlib.contextmanager
    def region(self, stage: int, microbatch: int) -> Iterator[None]:
        """Alone with the generators; where there is a seed, from the state of this stage and microbatch, and back."""
        with self.lock:
            before = self.states()
            self.moved_elsewhere |= not same_states(before, self._expected)
            if self.seed is not None:
                seed = microbatch_seed(self.seed, self.step, stage, microbatch)
                for generator in self.generators:
                    generator.manual_seed(seed)
            try:
                yield
            finally:
                if self.seed is not None:
                    for generator, state in zip(self.generators, before, strict=True):
                        generator.set_state(state)
                self._expected = before if self.seed is not None else self.states()


def same_states(first: States, second: States) -> bool:
    """Whether the generators stand where they stood."""
    return all(map(torch.equal, first, second))


class StageRandom:
    """What one stage does with the generators, and what is done about it.

    Args:
        generators: of the pipeline.
        stage: its index.

    Attributes:
        guards_forward: whether F is a region.
        guards_backward: whether B, I and W are.
        watches: whether `drew` and `recomputed` are to be found out; every action is then a region.
        listens: whether a backward that is no region is watched for the forward of a recompute.
        recomputes: whether a backward that may be half of a pair is known to run forwards again.
        drew: whether numbers were drawn.
        recomputed: whether a backward may have set the generators.
    """

    def __init__(self, generators: Generators, stage: int) -> None:
        self.generators = generators
        self.stage = stage
        self.guards_forward = self.guards_backward = self.watches = self.listens = self.recomputes = False
        self.drew = self.recomputed = False

    def forward(self, microbatch: int) -> AbstractContextManager[None]:
        """Around F."""
        return self._forward_region(microbatch) if self.guards_forward else contextlib.nullcontext()

    def backward(self, microbatch: int, *, whole: bool = True) -> AbstractContextManager[None]:
        """Around B or I; around W with ``whole=False``, which makes nodes of its own."""
        if self.guards_backward:
            return self._backward_region(microbatch, whole)
        return self._listening() if self.listens and whole else contextlib.nullcontext()

    @contextlib.contextmanager
    def _forward_region(self, microbatch: int) -> Iterator[None]:
        with self.generators.region(self.stage, microbatch), self._watching() as moved:
            yield
        self.drew |= moved()

    @contextlib.contextmanager
    def _backward_region(self, microbatch: int, whole: bool) -> Iterator[None]:
        listening = self._listening() if whole else contextlib.nullcontext()
        with self.generators.region(self.stage, microbatch), self._watching() as moved, listening:
            yield
        self.drew |= moved()
        self.recomputed |= moved()

    @contextlib.contextmanager
    def _watching(self) -> Iterator[Callable[[], bool]]:
        """Whether the generators were moved meanwhile."""
        states = [self.generators.states()] if self.watches else []
        yield lambda: len(states) == 2 and not same_states(*states)
        if self.watches:
            states.append(self.generators.states())

    @contextlib.contextmanager
    def _listening(self) -> Iterator[None]:
        """A backward makes no nodes of autograd, but for those of what it recomputes."""
        before = _sequence_number()
        yield
        self.recomputed |= _sequence_number() != before

    def note_graph(self, outputs: Sequence[torch.Tensor]) -> None:
        """After F: a function of Python's in the graph may do anything in its backward."""
        seen: set[Any] = set()
        stack: list[Any] = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
        while stack and not self.recomputed:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            self.recomputed = isinstance(node, BackwardCFunction) and not _is_ours(node)
            stack.extend(next_node for next_node, _ in node.next_functions)


def may_run_together(forward: StageRandom | None, backward: StageRandom | None) -> bool:
    """Whether an F and a B of two stages need not exclude each other.

    What is recomputed writes buffers again, BatchNorm's say, and an F of the same stage does so, too.
    """
    if forward is backward and forward is not None and forward.recomputes:
        return False
    return forward is None or backward is None or not (forward.guards_forward and backward.guards_backward)


@contextlib.contextmanager
def pair_region(
    forward: StageRandom | None, backward: StageRandom | None, microbatch: int, pair_microbatch: int
) -> Iterator[None]:
    """Around an F and a B that the modules' own method runs as it likes."""
    with contextlib.ExitStack() as stack:
        if forward is not None and forward.guards_forward:
            stack.enter_context(forward.forward(microbatch))
        elif backward is not None and backward.guards_backward:
            stack.enter_context(backward.backward(pair_microbatch, whole=False))
        yield
    if backward is not None and backward.watches:
        # by itself it was not seen
        backward.recomputed = True


def _is_ours(node: Any) -> bool:
    function: Any = node._forward_cls
    return str(function.__module__).startswith("fastpipe.")


def _sequence_number() -> int:
    """How many nodes of autograd this thread has made."""
    return int(torch._C._autograd._get_sequence_nr())
