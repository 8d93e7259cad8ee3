"""Random numbers: a state for every stage and microbatch, and which actions of a process exclude each other.

Torch has one default generator per device and process. A forward that draws advances it. A checkpoint's recompute sets
it to the state of its forward, draws, and restores it. If another action of the process (of another rank in a thread,
or the other half of a pair) uses the generator meanwhile, the recompute draws another mask than its forward, and
gradients are wrong without an error. Therefore:

* With ``rng="per_microbatch"`` the forwards of a process exclude each other: each starts from its own state.
* Where numbers are drawn and a backward recomputes, all actions of the process exclude each other.

Both facts (`RngUsage`) are detected in the first step of each kind, in which all actions exclude each other. A kind is
training or evaluation, plus the modules' flags: training mode, frozen parameters. If a later step does what the first
did not, and its bits may be wrong, it fails, and the next step uses the new facts.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch

from fastpipe.runtime import native
from fastpipe.runtime.common import torch_private

PER_MICROBATCH = "per_microbatch"
_MAX_KINDS = 16
"""Number of kinds of steps that are cached."""
_WORD = 2**64 - 1


class RngUsage(NamedTuple):
    """Use of random numbers by the stages of this process in one kind of step.

    Attributes:
        draws: whether they draw from the default generators.
        recomputes: whether a backward may set these, as a checkpoint does.
    """

    draws: bool
    recomputes: bool

    def __or__(self, other: RngUsage) -> RngUsage:
        return RngUsage(self.draws or other.draws, self.recomputes or other.recomputes)


def microbatch_seed(seed: int, step: int, stage: int, microbatch: int) -> int:
    """The 64-bit seed of one stage and microbatch, the same on every machine.

    Each number plus 1 is multiplied by the increment of splitmix64 (Steele, Lea and Flood 2014), added, and mixed by
    its finalizer. Torch's CPU generator uses the lower 32 bits.
    """
    mixed = seed & _WORD
    for number in (step, stage, microbatch):
        mixed = (mixed + 0x9E3779B97F4A7C15 * (number + 1)) & _WORD
        mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
        mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _WORD
        mixed ^= mixed >> 31
    return mixed


class Generators:
    """The default generators of the CPU and of a stage's device."""

    def __init__(self, device: torch.device) -> None:
        self._generators = [torch.default_generator]
        if device.type != "cpu":
            module = torch.get_device_module(device)
            index = module.current_device() if device.index is None else device.index
            self._generators.append(module.default_generators[index])

    def states(self) -> list[torch.Tensor]:
        """State of each generator."""
        return [generator.get_state() for generator in self._generators]

    def match(self, states: Sequence[torch.Tensor]) -> bool:
        """Whether the generators have these states."""
        return all(map(torch.equal, self.states(), states))

    def restore(self, states: Sequence[torch.Tensor]) -> None:
        """Set the state of each generator."""
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)

    @contextlib.contextmanager
    def seeded(self, seed: int) -> Iterator[None]:
        """Seed the generators; restores their states at the end."""
        before = self.states()
        for generator in self._generators:
            generator.manual_seed(seed)
        try:
            yield
        finally:
            self.restore(before)


class GeneratorsLock:
    """Lock of this process's default generators, without the extension."""

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
    """Lock of this process's default generators; with the extension the native executor's."""
    runtime: Any = native.load()
    if runtime is None:
        return _python_lock
    lock: GeneratorsLock = runtime.GeneratorsLock()
    return lock


class RngGuard:
    """Guards the generators in a step's backwards; the native executor has ``csrc/torch/random_numbers.h``.

    Attributes:
        exclusive: whether all actions exclude each other.
        recomputes: whether a backward may recompute forwards.
        recomputed: whether a recompute was detected.
    """

    exclusive = recomputes = recomputed = False

    @contextlib.contextmanager
    def backward(self, *, whole: bool = True) -> Iterator[None]:
        """Around B or I; around W with ``whole=False``, as W creates autograd nodes itself."""
        with generators_lock() if self.exclusive else contextlib.nullcontext():
            # a backward creates autograd nodes only when it recomputes
            before = torch_private.sequence_number()
            yield
            self.recomputed |= whole and torch_private.sequence_number() != before


class RandomNumbers:
    """The random numbers of a pipeline's stages on this process.

    Args:
        seed: seed of the states with ``rng="per_microbatch"``; else None.
        threads: whether several ranks are threads of this process.
        pairs: whether the two halves of a pair may run at the same time.
        runtime: the extension, for the native executor.

    Attributes:
        step_count: number of training steps; part of the states.
        elsewhere: usage in this kind of step by the processes with which pairs must run alike.
        guards_forward: whether forwards exclude other actions in this step.
    """

    def __init__(
        self, device: torch.device, *, seed: int | None, threads: bool, pairs: bool, runtime: Any = None
    ) -> None:
        self.seed = seed
        self.threads = threads
        self.pairs = pairs
        self.step_count = 0
        self.elsewhere = RngUsage(draws=False, recomputes=False)
        self.guards_forward = False
        self.guard: RngGuard = RngGuard() if runtime is None else runtime.RngGuard()
        self._generators = Generators(device)
        # a device's backward runs in torch's threads, where a recompute is not detected
        self._assumes_recompute = device.type != "cpu"
        self._kinds: dict[tuple[Any, ...], RngUsage] = {}
        self._kind: tuple[Any, ...] = ()
        self._kind_in_pairs: tuple[Any, ...] = ()
        self._is_first_of_kind = False
        self._has_drawn = False
        self._begin: list[torch.Tensor] | None = None

    def check_free(self, has_pairs: bool) -> None:
        """Before a step: check that its caller does not hold the generators, which would deadlock.

        Raises:
            RuntimeError: in a layer, loss function or hook of another pipeline whose actions exclude each other.
        """
        if self._matters(has_pairs) and generators_lock().held_here():
            raise RuntimeError(
                "this step was called by a layer, loss function or hook of another pipeline, and the ranks of both are "
                "threads, or draw by rng=: they use torch's random generators one at a time, and this step would wait "
                "for its caller to release them; give the inner pipeline num_ranks=1 and no rng, or call its layers"
            )

    def _matters(self, has_pairs: bool) -> bool:
        return self.seed is not None or self.threads or (self.pairs and has_pairs)

    def usage(self, training: bool, flags: tuple[Any, ...]) -> RngUsage:
        """Usage in a kind of step; before the first one it is assumed."""
        return self._kinds.get((training, flags), RngUsage(draws=True, recomputes=True))

    def begin(self, training: bool, flags: tuple[Any, ...], has_pairs: bool) -> bool:
        """Begin a step: decide which actions exclude each other.

        Returns:
            Whether the actions of the step need this guard at all.
        """
        matters = self._matters(has_pairs)
        self._begin = self._generators.states() if matters else None
        if not matters:
            return False
        self._kind = (training, flags)
        if self.pairs and has_pairs:
            self._kind_in_pairs = self._kind
        usage = self.usage(training, flags) | self.elsewhere
        self._is_first_of_kind, self._has_drawn = self._kind not in self._kinds, False
        self.guards_forward = usage.draws and (usage.recomputes or self.seed is not None)
        self.guard.exclusive = usage.draws and usage.recomputes
        self.guard.recomputes, self.guard.recomputed = usage.recomputes, False
        return True

    @contextlib.contextmanager
    def forward(self, stage: int, microbatch: int) -> Iterator[None]:
        """Around a forward if `guards_forward`: holds the lock, and uses the microbatch's state if there is a seed."""
        seeded: AbstractContextManager[None] = contextlib.nullcontext()
        if self.seed is not None:
            seeded = self._generators.seeded(microbatch_seed(self.seed, self.step_count, stage, microbatch))
        with generators_lock(), seeded:
            before = self._generators.states() if self._is_first_of_kind else []
            yield
            self._has_drawn |= self._is_first_of_kind and not self._generators.match(before)

    def note_graph(self, outputs: Sequence[torch.Tensor]) -> None:
        """After a forward: if its graph has a Python function, assume that the backward recomputes."""
        if not self._is_first_of_kind or self.guard.recomputed:
            return
        nodes = _reached([output.grad_fn for output in outputs])
        functions = map(torch_private.function_of, nodes)
        self.guard.recomputed = any(f is not None and not f.__module__.startswith("fastpipe.") for f in functions)

    def note_fused(self) -> None:
        """After a fused pair: assume a recompute, as its backward was not observed separately."""
        self.guard.recomputed |= self._is_first_of_kind

    def in_pairs(self) -> RngUsage | None:
        """Usage in the last kind of step with pairs, which decides how pairs run; None before the first."""
        return self._kinds.get(self._kind_in_pairs)

    def check(self) -> RuntimeError | None:
        """After a step that succeeded on this process: update its kind; returns an error if its bits may be wrong."""
        if self._begin is None:
            return None
        moved = not self._generators.match(self._begin)
        if moved and self.seed is not None:
            self._generators.restore(self._begin)
        # guarded forwards restore the states, so a backward changed them
        by_backward = moved and self.seed is not None and self.guards_forward
        recomputed = self.guard.recomputed or by_backward or (self._assumes_recompute and self._kind[0])
        found = RngUsage(self._has_drawn or moved, recomputed)
        previous = self._kinds.pop(self._kind, None)
        if len(self._kinds) == _MAX_KINDS:
            del self._kinds[next(iter(self._kinds))]
        usage = self._kinds[self._kind] = found if previous is None else previous | found
        return None if previous is None else self._refusal(previous, usage)

    def _refusal(self, previous: RngUsage, usage: RngUsage) -> RuntimeError | None:
        concurrent = self.threads or self.pairs
        if usage.recomputes and not previous.recomputes and concurrent and (usage.draws or self.pairs):
            text = "a backward recomputed a forward, or drew random numbers itself,"
        elif usage.draws and not previous.draws and (self.seed is not None or usage.recomputes):
            text = "random numbers were drawn from torch's default generator"
        else:
            return None
        return RuntimeError(
            f"{text} in this step, but not in the first step of its kind; gradients or random numbers of "
            "this step may be wrong, so zero the gradients and call step again: from now on it is taken into account"
        )

    def done(self, training: bool) -> None:
        """After a step that succeeded on all ranks."""
        self.step_count += training

    def call_text(self, is_audited: bool) -> str:
        """The part of a step's call that must agree on all ranks, as text."""
        return f" and step_count={self.step_count}" if self.seed is not None or is_audited else ""


def _reached(nodes: Sequence[Any]) -> set[Any]:
    """The nodes that a backward from these reaches."""
    stack, reached = list(nodes), set()
    while stack:
        node = stack.pop()
        if node is not None and node not in reached:
            reached.add(node)
            stack.extend(next_node for next_node, _ in node.next_functions)
    return reached
