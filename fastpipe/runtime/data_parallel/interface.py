"""Data parallelism: what a stage whose module is replicated, or sharded, does beside its forwards and backwards.

A wrapper reduces gradients from hooks in the backward. In a pipeline a backward is one microbatch's, it may come in two
parts, and the last to end need not be that of the last forward. So the hooks are held back while a step runs, and what
they would do is done once a step, at the program's instructions: UNSHARD before a stage is used, REDUCE_GRAD when its
gradients are complete. The reduction is awaited when the rank's program has ended.

A rank that drains a failed step takes part in its collectives all the same, and reports in them that it failed: the
other replicas neither wait for it nor train on what it gave.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import torch
from torch import nn

from fastpipe.runtime.common import children_of, parameters_of


class DataParallel(ABC):
    """The replicas of one stage, in one step after the other."""

    def prepare(self) -> None:  # noqa: B027 - most are ready as they are
        """Before a step is agreed on: whatever may be wrong with the wrapper shows here, and not while others wait."""

    def missed(self) -> list[str]:
        """By name, parameters that are to be trained and that it would not reduce: they were not when it was made.

        Raises:
            ValueError: where it cannot be told of them.
        """
        return []

    def ask(self) -> None:  # noqa: B027 - most miss nothing
        """The step that has begun is none: the replicas only come together to say whether they miss parameters."""

    def adopt(self) -> bool:
        """After that: reduce them from now on, if all replicas do. Whether there was anything to be done.

        Raises:
            ValueError: when another replica does not, or has others.
        """
        return False

    @property
    @abstractmethod
    def wrapped(self) -> Sequence[nn.Module]:
        """The modules of the stage that the user has wrapped; what is in them is the wrapper's."""

    def check_covers(self, module: nn.Module, stage: int) -> None:
        """Refuse parameters outside of what is wrapped, whose gradients nobody would average.

        Args:
            module: the stage's.
            stage: its index.

        Raises:
            ValueError: with their names and what to do.
        """
        wrapped = set(self.wrapped)
        if module in wrapped or self.num_replicas == 1:
            return
        found, pending = [], [("", module)]
        for prefix, inner in pending:
            # one that is spread over processes is the user's to reduce
            found += [
                prefix + name
                for name, p in parameters_of(inner).items()
                if p is not None and p.requires_grad and not hasattr(p, "placements")
            ]
            children = [(f"{prefix}{name}.", child) for name, child in children_of(inner).items() if child is not None]
            pending += [(name, child) for name, child in children if child not in wrapped]
        if found:
            raise ValueError(
                f"stages: stage {stage} is {self.description}, but not its {listed(found)}, whose gradients would not "
                "be averaged over the replicas; wrap them too, or the stage as a whole"
            )

    @abstractmethod
    def begin(self, reduces: bool) -> None:
        """A step begins: hold the wrapper's hooks back.

        Args:
            reduces: whether gradients are reduced in it; False where steps accumulate.
        """

    @abstractmethod
    def unshard(self, failed: bool) -> None:
        """The stage is about to be used."""

    @abstractmethod
    def reshard(self) -> None:
        """The stage is not used for a while."""

    @property
    def folds(self) -> bool:
        """Whether `fold` is wanted after every backward for weights."""
        return False

    def fold(self) -> None:  # noqa: B027 - most have nothing to do
        """A microbatch's gradients are complete."""

    def last_backward(self, comes: Callable[[nn.Parameter], bool]) -> None:  # noqa: B027 - most wait for REDUCE_GRAD
        """The stage's last B or W begins, and its REDUCE_GRAD follows before anything else that meets.

        Args:
            comes: whether a parameter's gradient comes in it; the others' are complete.
        """

    @abstractmethod
    def reduce_grad(self, failed: bool) -> None:
        """All gradients of the step are complete: start to reduce them.

        Args:
            failed: the step failed on this rank, so the gradients are worth nothing.
        """

    @abstractmethod
    def finish(self, failed: bool, deadline: float) -> None:
        """The step is over: wait for what was started, and let the wrapper have its hooks back.

        Args:
            failed: it failed on this rank.
            deadline: until when to wait for the other replicas, on the monotonic clock.

        Raises:
            FailureError: when it failed in another replica, and not here. The failure is fatal when another replica did
                not come, as what is still under way cannot be taken back.
        """

    @property
    @abstractmethod
    def num_replicas(self) -> int:
        """How many processes share the stage."""

    @property
    @abstractmethod
    def whole_gradients(self) -> bool:
        """Whether ``.grad`` is that of a whole parameter, so that others may sum or compare it."""

    @property
    @abstractmethod
    def description(self) -> str:
        """What the stage is wrapped in, for `Pipeline.describe`."""

    def leaf(self, parameter: nn.Parameter) -> torch.Tensor:
        """The leaf of autograd's graph that stands for a parameter."""
        return parameter

    def whole_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """What steps that reduced nothing gave this replica, for the whole of a parameter."""
        return parameter.grad

    def put_aside(self) -> Callable[[], None]:
        """Put aside gradients that wait to be reduced and are not in ``.grad``; the function puts them back."""
        return lambda: None


def listed(names: Sequence[str]) -> str:
    """The first few of them."""
    if not names:
        return "none"
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
