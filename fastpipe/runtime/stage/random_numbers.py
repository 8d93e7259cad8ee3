"""Random numbers: a state for every stage and microbatch, and which actions of a process exclude each other.

Torch has one default generator a device for the whole process. A forward that draws moves it. A checkpoint that
recomputes sets it to the state of its forward, draws, and restores it. If another action of the process (of another
rank that is a thread, or the other half of a pair) uses the generator meanwhile, the recompute draws another mask than
its forward did, and gradients are wrong without an error. The rule:

* With ``rng="per_microbatch"`` the forwards of a process exclude each other: each starts from a state of its own.
* Where numbers are drawn and a backward recomputes, all actions of the process exclude each other.

Both facts (`RngUsage`) are found in the first step of its kind, in which all actions exclude each other. A kind is
training or not, and the flags of the modules: training mode, frozen parameters. If a later step does what the first one
did not, and its bits may be wrong, it is refused, and the next one takes it into account.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from fastpipe.runtime import native
from fastpipe.runtime.common import torch_private
from fastpipe.runtime.stage.stage import Stage

PER_MICROBATCH = "per_microbatch"
_MAX_KINDS = 16
"""How many kinds of steps are remembered; training and evaluation are two."""
_WORD = 2**64 - 1


@dataclass(frozen=True)
class RngUsage:
    """What the stages of this process do in one kind of step.

    Attributes:
        draws: whether they draw from the default generators.
        recomputes: whether a backward may set the generators, as a checkpoint does.
    """

    draws: bool
    recomputes: bool

    def __or__(self, other: RngUsage) -> RngUsage:
        return RngUsage(self.draws or other.draws, self.recomputes or other.recomputes)


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


class Generators:
    """The default generators that a stage draws from: the CPU's, and that of its device."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            index = module.current_device() if device.index is None else device.index
            self._generators.append(module.default_generators[index])

    def states(self) -> list[torch.Tensor]:
        """The state of each."""
        return [generator.get_state() for generator in self._generators]

    def stand_at(self, states: Sequence[torch.Tensor]) -> bool:
        """Whether these are their states."""
        return all(map(torch.equal, self.states(), states))

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Set each to its state."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """From the state of this seed, and back to where they were."""
        before = self.states()
        for generator in self._generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            self.restore(before)


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
        """Whether this thread holds it."""
        return self._holder == threading.get_ident()


_python_lock = GeneratorsLock()


def generators_lock() -> GeneratorsLock:
    """The lock of this process's default generators; the native executor's own where there is one."""
    runtime: Any = native.load()
    if runtime is None:
        return _python_lock
    lock: GeneratorsLock = runtime.GeneratorsLock()
    return lock


class RngGuard:
    """What a step's backwards do about the generators; ``csrc/torch/random_numbers.h`` is the native executor's.

    Attributes:
        exclusive: whether all actions exclude each other.
        recomputes: whether a backward may run forwards again.
        recomputed: whether one was seen to.
    """

    exclusive = recomputes = recomputed = False

    @contextlib.contextmanager
    def backward(self, *, whole: bool = True) -> Iterator[None]:
        """Around B or I; around W with ``whole=False``, which makes nodes of its own."""
        with generators_lock() if self.exclusive else contextlib.nullcontext():
            # a backward makes no nodes of autograd, but for those of what it recomputes
            before = torch_private.sequence_number()
            yield
            self.recomputed |= whole and torch_private.sequence_number() != before


class RandomNumbers:
    """The random numbers of a pipeline's stages on this process.

    Args:
        device: what the stages compute on.
        seed: with ``rng="per_microbatch"``: what the states are derived from; else None.
        threads: whether there are several ranks in this process, as threads.
        pairs: whether the two halves of a pair may run at the same time.
        runtime: the extension, where the native executor runs.

    Attributes:
        step_count: the number of training steps, which is a part of the states.
        guard: what backwards do in this step.
        guards_forward: whether forwards exclude other actions in this step.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        seed: int | None,
        threads: bool,
        pairs: bool,
        runtime: Any = None,
    ) -> None:
        self.seed = seed
        self.threads = threads
        self.pairs = pairs
        self.step_count = 0
        self.guards_forward = False
        self.guard: RngGuard = RngGuard() if runtime is None else runtime.RngGuard()
        self._generators = Generators(device)
        # a device's backward has a thread of its own, where nobody sees a recompute
        self._unseen = device.type != "cpu"
        self._kinds: dict[tuple[Any, ...], RngUsage] = {}
        self._kind: tuple[Any, ...] = ()
        self._kind_in_pairs: tuple[Any, ...] | None = None
        self._watches = False
        self._drew = False
        self._begin: list[torch.Tensor] | None = None

    def check_free(self, has_pairs: bool) -> None:
        """Before a step: refuse one that would wait for the generators, for ever, since its own caller has them.

        Args:
            has_pairs: whether there are pairs among its actions.

        Raises:
            RuntimeError: in a layer, loss function or hook of another pipeline whose actions exclude each other.
        """
        if self._matters(has_pairs) and generators_lock().held_here():
            raise RuntimeError(
                "this step was called by a layer, loss function or hook of another pipeline, and the ranks of both are "
                "threads, or draw by rng=: they use torch's random generators one at a time, and this step would wait "
                "for its caller to let them go; give the inner pipeline num_ranks=1 and no rng, or call its layers"
            )

    def _matters(self, has_pairs: bool) -> bool:
        return self.seed is not None or self.threads or (self.pairs and has_pairs)

    def begin(self, stages: Sequence[Stage], training: bool, flags: tuple[bool, ...], has_pairs: bool) -> None:
        """A step begins: decide which actions exclude each other.

        Args:
            stages: the local ones. They refer to this, so this does not keep them: a dropped pipeline is freed at once.
            training: whether there are backwards.
            flags: of the stages' modules, those of training mode among them.
            has_pairs: whether there are pairs among its actions.
        """
        matters = self._matters(has_pairs)
        for stage in stages:
            stage.random = self if matters else None
        self._begin = self._generators.states() if matters else None
        if not matters:
            return
        self._kind = (training, flags)
        if self.pairs and has_pairs:
            self._kind_in_pairs = self._kind
        known = self._kinds.get(self._kind)
        usage = known or RngUsage(draws=True, recomputes=True)
        self._watches, self._drew = known is None, False
        self.guards_forward = usage.draws and (usage.recomputes or self.seed is not None)
        self.guard.exclusive = usage.draws and usage.recomputes
        self.guard.recomputes, self.guard.recomputed = usage.recomputes, False

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a forward where `guards_forward`: alone with the generators, in its own state if there is a seed."""
        with generators_lock(), self._seeded(stage, microbatch):
            before = self._generators.states() if self._watches else []
            yield
            self._drew |= self._watches and not self._generators.stand_at(before)

    def _seeded(self, stage: int, microbatch: int) -> AbstractContextManager[None]:
        if self.seed is None:
            return contextlib.nullcontext()
        return self._generators.seeded(microbatch_seed(self.seed, self.step_count, stage, microbatch))

    def note_graph(self, outputs: Sequence[torch.Tensor]) -> None:
        """After a forward: a function of Python's in its graph may do anything in its backward."""
        if not self._watches or self.guard.recomputed:
            return
        seen: set[Any] = set()
        stack: list[Any] = [get_gradient_edge(output).node for output in outputs if output.requires_grad]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            function = torch_private.function_of(node)
            if function is not None and not function.__module__.startswith("fastpipe."):
                self.guard.recomputed = True
                return
            stack.extend(next_node for next_node, _ in node.next_functions)

    def note_fused(self) -> None:
        """After a pair that the modules ran by their own method, in which nobody saw the backward by itself."""
        self.guard.recomputed |= self._watches

    def in_pairs(self) -> RngUsage | None:
        """What the stages did in the last kind of step with pairs, which decides whether these run in order.

        Returns:
            None before the first one.
        """
        return None if self._kind_in_pairs is None else self._kinds.get(self._kind_in_pairs)

    def check(self) -> RuntimeError | None:
        """A step has ended well here: learn from it.

        Returns:
            What is wrong with the step, if it did what the first one of its kind did not.
        """
        if self._begin is None:
            return None
        moved = not self._generators.stand_at(self._begin)
        if moved and self.seed is not None:
            self._generators.restore(self._begin)
        # guarded forwards start from a seed and put the states back, so what moved them was a backward
        by_backward = moved and self.seed is not None and self.guards_forward
        recomputed = self.guard.recomputed or by_backward or (self._unseen and self._kind[0])
        found = RngUsage(self._drew or moved, recomputed)
        known = self._kinds.pop(self._kind, None)
        if len(self._kinds) == _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        usage = self._kinds[self._kind] = found if known is None else known | found
        return None if known is None else self._refusal(known, usage)

    def _refusal(self, known: RngUsage, usage: RngUsage) -> RuntimeError | None:
        concurrent = self.threads or self.pairs
        if usage.recomputes and not known.recomputes and concurrent and (usage.draws or self.pairs):
            text = "a backward recomputed a forward, or drew random numbers itself,"
        elif usage.draws and not known.draws and (self.seed is not None or usage.recomputes):
            text = "random numbers were drawn from torch's default generator"
        else:
            return None
        return RuntimeError(
            f"{text} in this step, which was not so in the first step of its kind; gradients or random numbers of "
            "this step may be wrong, so zero the gradients and call step again: from now on it is taken into account"
        )

    def done(self, training: bool) -> None:
        """A step has ended well everywhere."""
        self.step_count += training

    def call_text(self) -> str:
        """What must be the same on every rank in a step."""
        return "" if self.seed is None else f" and step_count={self.step_count}"


def describe_random(seed: int) -> str:
    """Where random numbers come from, in one line."""
    return f"numbers of every stage and microbatch their own, from the seed {seed} and the number of the step"
