"""Random numbers: which stages draw, which recompute, and whether every F starts from a state of its own.

What a stage does is found in the first step of its kind (training or not, and the flags of its modules: which are in
training mode, which parameters are frozen). In it everything is taken to draw and to recompute: all actions are regions
of `fastpipe.runtime.generators`, one at a time. From the next step on only those are that need to be, so where nothing
draws nothing is paid. A step in which that turns out to be wrong is refused if its gradients or its masks may be wrong,
and everything is a region again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastpipe.runtime.generators import Generators, StageRandom, generators_lock
from fastpipe.runtime.stage import Stage

PER_MICROBATCH = "per_microbatch"
_MAX_KINDS = 16
"""How many kinds of steps are remembered; training and evaluation are two."""


@dataclass(frozen=True)
class Habits:
    """What a stage was seen to do.

    Attributes:
        draws: whether it draws random numbers.
        recomputes: whether its backward may set the generators, as a checkpoint does.
    """

    draws: bool
    recomputes: bool


_EVERYTHING = Habits(draws=True, recomputes=True)


class RandomNumbers:
    """The random numbers of a pipeline's stages on this process.

    Args:
        stages: the local ones.
        device: what they compute on.
        seed: with ``rng="per_microbatch"``: what the states are derived from; else None.
        threads: whether there are several ranks in this process, as threads.
        pairs: whether the two halves of a pair may run at the same time.
        runtime: the extension, where the native executor runs.

    Attributes:
        step_count: the number of training steps, which is a part of the states.
    """

    def __init__(
        self,
        stages: Sequence[Stage],
        device: torch.device,
        *,
        seed: int | None,
        threads: bool,
        pairs: bool,
        runtime: Any = None,
    ) -> None:
        self.stages = stages
        self.seed = seed
        self.threads = threads
        self.pairs = pairs
        # a device's backward has a thread of its own, where nobody sees a recompute
        self._unseen = device.type != "cpu"
        self.step_count = 0
        self._kinds: dict[tuple[Any, ...], list[Habits]] = {}
        self._kind: tuple[Any, ...] = ()
        self._kind_in_pairs: tuple[Any, ...] | None = None
        self._active = False
        self._checked = False
        self._randoms: list[StageRandom] = []
        if seed is None and not threads and not pairs:
            return
        made = runtime if runtime is not None else _PYTHON
        self._generators = made.Generators(device, seed)
        self._randoms = [made.StageRandom(self._generators, stage.index) for stage in stages]

    def check_free(self, has_pairs: bool) -> None:
        """Before a step: refuse one that would wait for the generators, for ever, since its own caller has them.

        Args:
            has_pairs: whether there are pairs among its actions.

        Raises:
            RuntimeError: in a layer, loss function or hook of another pipeline where actions are regions.
        """
        if self._has_regions(has_pairs) and generators_lock().held_here():
            raise RuntimeError(
                "this step was called by a layer, loss function or hook of another pipeline, and the ranks of both are "
                "threads, or draw by rng=: they use torch's random generators one at a time, and this step would wait "
                "for its caller to let them go; give the inner pipeline num_ranks=1 and no rng, or call its layers"
            )

    def _has_regions(self, has_pairs: bool) -> bool:
        return bool(self._randoms) and (self.threads or (self.pairs and has_pairs) or self.seed is not None)

    def begin(self, training: bool, flags: tuple[bool, ...], has_pairs: bool) -> None:
        """A step begins: decide which actions are regions.

        Args:
            training: whether there are backwards.
            flags: of the stages' modules, those of training mode among them.
            has_pairs: whether there are pairs among its actions.
        """
        pairs = self.pairs and has_pairs
        concurrent = self.threads or pairs
        self._active = self._has_regions(has_pairs)
        if not self._active:
            for stage in self.stages:
                stage.random = None
            return
        self._kind = (training, flags)
        if pairs and training:
            self._kind_in_pairs = self._kind
        known = self._kinds.get(self._kind)
        habits = known or [_EVERYTHING] * len(self.stages)
        any_draws = any(habit.draws for habit in habits)
        # A recompute puts the generator back, and with it whatever was drawn beside it: that could not be noticed.
        all_guarded = concurrent and any_draws and any(habit.recomputes for habit in habits)
        for stage, random, habit in zip(self.stages, self._randoms, habits, strict=True):
            random.watches = known is None
            random.guards_forward = habit.draws or all_guarded
            random.guards_backward = habit.recomputes and any_draws
            random.listens = any_draws and not random.guards_backward
            random.recomputes = habit.recomputes and pairs
            random.drew = random.recomputed = False
            matters = random.guards_forward or random.guards_backward or random.listens or random.recomputes
            stage.random = random if matters else None
        self._checked = not all(random.guards_forward and random.guards_backward for random in self._randoms)
        if any_draws or self._checked:
            self._generators.begin(self.step_count)

    def in_pairs(self) -> list[tuple[Stage, Habits]] | None:
        """What the stages did in the last kind of step with pairs, which decides whether these run in order.

        Returns:
            None before the first one.
        """
        habits = None if self._kind_in_pairs is None else self._kinds.get(self._kind_in_pairs)
        return None if habits is None else list(zip(self.stages, habits, strict=True))

    def check(self) -> RuntimeError | None:
        """A step has ended well here: learn from it.

        Returns:
            What is wrong with the step, if what was known of the stages did not hold.
        """
        if not self._active:
            return None
        if self._kind not in self._kinds:
            if len(self._kinds) == _MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            self._kinds[self._kind] = [Habits(r.drew, r.recomputed or self._unseen) for r in self._randoms]
            return None
        return self._refusal() if self._checked else None

    def _refusal(self) -> RuntimeError | None:
        drew = self._generators.end()
        recomputed = [r.stage for r in self._randoms if r.recomputed and r.listens]
        if not drew and not recomputed:
            return None
        habits = self._kinds[self._kind]
        self._kinds[self._kind] = [_EVERYTHING] * len(self.stages)
        harmless = self.seed is None and not recomputed and not any(habit.recomputes for habit in habits)
        if harmless:
            return None
        found = (
            f"the backward of stage {recomputed[0]} recomputed a forward"
            if recomputed
            else "random numbers were drawn from torch's default generator"
        )
        return RuntimeError(
            f"{found} in this step, which was not so in the first step of its kind; gradients or random numbers of "
            "this step may be wrong, so zero the gradients and call step again: from now on it is taken into account"
        )

    def done(self, training: bool) -> None:
        """A step has ended well everywhere."""
        self.step_count += training

    def call_text(self) -> str:
        """What must be the same on every rank in a step."""
        return "" if self.seed is None else f" and step_count={self.step_count}"


class _Python:
    """The same classes as the extension has."""

    Generators = Generators
    StageRandom = StageRandom


_PYTHON = _Python()


def check_seeds(seeds: Sequence[int | None]) -> None:
    """Refuse ranks whose seeds differ; None for one with torch's own generators.

    Raises:
        ValueError: saying which rank has which.
    """
    if len(set(seeds)) > 1:
        listed = ", ".join(f"{'none' if seed is None else seed} on rank {rank}" for rank, seed in enumerate(seeds))
        raise ValueError(
            f"rng = {PER_MICROBATCH!r}: the seed, torch.initial_seed(), is {listed}; pass the same rng on every rank, "
            "and call torch.manual_seed with the same number before"
        )


def describe_random(seed: int) -> str:
    """Where random numbers come from, in one line."""
    return f"numbers of every stage and microbatch their own, from the seed {seed} and the number of the step"
