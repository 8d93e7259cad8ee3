"""Data parallelism: the collectives of a replicated or sharded stage within a step.

A wrapper reduces gradients from hooks in the backward. In a pipeline a backward is one microbatch's, may have two
parts, and the last one to end need not belong to the last forward. So the hooks are disabled during a step. Their work
is done once per step, by the program's instructions: UNSHARD before a stage is used, REDUCE_GRAD when its gradients are
complete. The rank waits for the reduction after its program.

A rank that drains a failed step still takes part in its collectives, and reports the failure in them. So the other
replicas neither wait for it nor use its gradients.
"""

from __future__ import annotations

import hashlib
import threading
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import distributed_c10d

from fastpipe.runtime.common import (
    Failure,
    FailureError,
    cause_text,
    children_of,
    is_lost_connection,
    listed,
    lost_text,
    parameters_of,
)


def same_text(text: str, groups: Sequence[dist.ProcessGroup], device: torch.device) -> bool:
    """Whether all ranks of the groups, each a dimension of a mesh, have the same text. Collective."""
    own = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32, device=device)
    num_others = torch.zeros((), dtype=torch.int32, device=device)
    for group in groups:
        everywhere = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(everywhere, own, group=group)
        num_others += sum(not torch.equal(other, own) for other in everywhere)
    for group in groups:
        dist.all_reduce(num_others, group=group)
    return not int(num_others)


def others_in(groups: Sequence[dist.ProcessGroup]) -> list[int]:
    """The other processes of the groups."""
    return sorted({rank for group in groups for rank in dist.get_process_group_ranks(group)} - {dist.get_rank()})


_LONGEST = 2000
"""Bytes of a failure's text that other replicas get."""


def wait_for(future: Any, deadline: float, cause: Callable[[], str]) -> Any:
    """A future's value; `Future.wait` has no timeout.

    Raises:
        FailureError: with the cause, if it is late. It is fatal, as a running collective cannot be cancelled.
    """
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(max(0.0, deadline - time.monotonic())):
        raise FailureError(Failure(None, cause(), is_fatal=True))
    return future.wait()


def raised_by_collective(error: BaseException) -> bool:
    """Whether torch.distributed raised it. The type does not tell: Gloo raises RuntimeErrors, as anybody may."""
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(frame.f_globals.get("__name__") == distributed_c10d.__name__ for frame in frames)


class DataParallel(ABC):
    """The replicas of one stage.

    Attributes:
        wrapped: the wrapped modules of the stage; the wrapper handles all that is in them.
        groups: over which its collectives run, one for each dimension of the replicas' mesh.
        broken: groups, also of other stages, that have lost a process or missed a collective, with the cause. Nobody
            begins another collective there: Gloo ends the process if it receives messages of another size.
        num_replicas: the number of processes that share the stage.
        device: where its gradients are.
        description: the wrapper, for `Pipeline.describe`.
        whole_gradients: whether ``.grad`` belongs to a whole parameter, so that it may be summed or compared.
        num_microbatches, timeout: of this step.
    """

    stage: int
    wrapped: Sequence[nn.Module]
    groups: Sequence[dist.ProcessGroup]
    broken: ClassVar[WeakKeyDictionary[dist.ProcessGroup, str]] = WeakKeyDictionary()
    num_replicas: int
    device: torch.device
    description: str
    whole_gradients: ClassVar[bool]
    num_microbatches = 0
    timeout: float
    _reduces = _begun = False

    def marks(self) -> list[int]:
        """Numbers whose sums over the replicas tell whether all have the same `num_microbatches`."""
        return [self.num_microbatches**power for power in range(3)]

    def why_not_same(self, count: int, total: int, squares: int) -> str:
        """The error if the sums of `marks` show that replicas run other programs; empty if all run the same."""
        if count * squares == total**2:  # true of equal numbers alone
            return ""
        return (
            f"num_microbatches: the replicas of stage {self.stage} do not run the same step, here with "
            f"num_microbatches={self.num_microbatches}, on average with {total / count:g}; pass the same "
            "to step in all replicas"
        )

    def explained(self, cause: str, failure: str | None, deadline: float) -> str:
        """The cause of a failed step, with the place where another replica failed; all replicas call it.

        Raises:
            FailureError: a fatal one, if a group breaks in it.
        """
        found, before = (failure or "").encode()[:_LONGEST], self.lost()
        for group in self.groups:
            own = torch.frombuffer(bytearray(found.ljust(_LONGEST, b"\0")), dtype=torch.uint8).to(self.device)
            # of a group that this process has left, size() would raise in torch 2.14
            everywhere = [torch.empty_like(own) for _ in dist.get_process_group_ranks(group)]
            if not self.completes(deadline, dist.all_gather, everywhere, own, group=group):
                continue
            texts = (bytes(other.tolist()).rstrip(b"\0") for other in everywhere)
            found = next(filter(None, texts), b"")
        for group in set(self.lost()).difference(before):
            raise FailureError(Failure(None, self.broken[group], is_fatal=True))
        return f"{cause}: {found.decode(errors='ignore')}" if found else cause

    def wait(self, future: Any, deadline: float, group: dist.ProcessGroup) -> Any:
        """The value of the future of a group's collective, for which all replicas must come by the deadline.

        Raises:
            FailureError: a fatal one, if it is late or fails; the group is broken then.
        """
        try:
            # replicas of a broken group may never begin it
            return wait_for(future, time.monotonic() if group in self.broken else deadline, self.why_late)
        except RuntimeError as error:
            if group not in self.broken:
                self.lose(group, error)
            raise FailureError(Failure(None, self.broken[group], is_fatal=True)) from error

    def processes(self) -> list[int]:
        """The processes that it meets in its groups, and this one."""
        return sorted([*others_in(self.groups), dist.get_rank()])

    def averages(self) -> list[list[int]]:
        """For each group of parameters that is reduced together, the processes with a replica or a shard of them."""
        return [dist.get_process_group_ranks(group) for group in self.groups]

    def why_late(self) -> str:
        """The cause of a fatal failure, for replicas that have not come by the deadline."""
        return (
            f"another of the {self.num_replicas} replicas of stage {self.stage}, in the processes {self.processes()}, "
            "did not respond within the Pipeline's timeout; all must call step, and all or none of them in no_sync "
            "(eval_step reduces nothing), or it is slow: set a longer timeout"
        )

    def completes(self, deadline: float, collective: Callable[..., Any], *args: Any, group: dist.ProcessGroup) -> bool:
        """Run a collective in one of the groups; False if the group is broken.

        A group such as that of cp ends with the stages of its mesh; replicas in the other groups wait all the same.
        """
        if group not in self.broken:  # there some ranks wait for each other
            try:
                self.wait(collective(*args, group=group, async_op=True).get_future(), deadline, group)
            except RuntimeError as error:
                self.lose(group, error)
        return group not in self.broken

    def lost(self) -> list[dist.ProcessGroup]:
        """Its groups that are broken."""
        return [group for group in self.groups if group in self.broken]

    def lose(self, group: dist.ProcessGroup, error: RuntimeError) -> None:
        """Note in `broken` that a collective of a group was late or raised, and who may have caused that."""
        if isinstance(error, FailureError):
            self.broken[group] = error.failure.cause
            return
        if not is_lost_connection(error):  # of the arguments, say
            self.broken[group] = f"this replica of stage {self.stage} could not run a collective: {cause_text(error)}"
            return
        self.broken[group] = f"of the replicas of stage {self.stage}, {lost_text(others_in([group]), error)}"

    def prepare(self) -> None:  # noqa: B027 - most are ready as they are
        """Raise errors of the wrapper before the ranks agree on a step, when no other rank waits."""

    def unreduced(self) -> list[str]:
        """Names of trainable parameters that it would not reduce, as they were not trainable at its creation.

        Raises:
            ValueError: if it cannot cover them.
        """
        return []

    def skip_step(self) -> None:  # noqa: B027 - most reduce all
        """Skip this step: the replicas only report to each other whether they miss parameters."""

    def reduce_new(self) -> bool:
        """After `skip_step`: reduce them from now on, if all replicas do; returns whether there were any.

        Raises:
            ValueError: if another replica does not miss the same parameters.
        """
        return False

    def check_covers(self, module: nn.Module) -> None:
        """Refuse parameters outside of the wrapped modules, which would not be averaged."""
        wrapped = set(self.wrapped)
        if module in wrapped or self.num_replicas == 1:
            return
        found, pending = [], [("", module)]
        for prefix, inner in pending:
            # the user reduces DTensors
            found += [
                prefix + name
                for name, p in parameters_of(inner).items()
                if p is not None and p.requires_grad and not hasattr(p, "placements")
            ]
            children = [(f"{prefix}{name}.", child) for name, child in children_of(inner).items() if child is not None]
            pending += [(name, child) for name, child in children if child not in wrapped]
        if found:
            raise ValueError(
                f"stages: stage {self.stage} is {self.description}, but not its {listed(found)}, whose gradients would "
                "not be averaged over the replicas; wrap them too, or the stage as a whole"
            )

    @abstractmethod
    def begin(self, reduces: bool, num_microbatches: int, timeout: float) -> None:
        """Start a step: disable the wrapper's hooks.

        Args:
            reduces: whether this step reduces gradients; False where steps accumulate.
            num_microbatches: must be the same in all replicas.
            timeout: seconds to wait for another replica.
        """
        self._reduces, self.num_microbatches, self._begun = reduces, num_microbatches, False
        self.timeout = timeout

    @abstractmethod
    def unshard(self) -> None:
        """Prepare the parameters; called before the stage is used."""

    @abstractmethod
    def reshard(self) -> None:
        """Free gathered parameters; the stage is not used for a while."""

    @property
    def folds(self) -> bool:
        """Whether `fold` must be called after every backward for weights."""
        return False

    def fold(self) -> None:  # noqa: B027 - most have nothing to do
        """Add the gradients of a microbatch, once they are complete."""

    def last_backward(self, comes: Callable[[nn.Parameter], bool]) -> None:  # noqa: B027 - most wait for REDUCE_GRAD
        """Called before the stage's last B or W; its REDUCE_GRAD follows before any other collective.

        Args:
            comes: whether this backward adds to a parameter's gradient; those of the others are complete.
        """

    @abstractmethod
    def reduce_grad(self, failed: bool) -> None:
        """Start to reduce; called when all gradients of the step are complete.

        Args:
            failed: the step failed on this rank, so its gradients are invalid.
        """

    @abstractmethod
    def finish(self, failure: str | None, deadline: float) -> None:
        """End a step: wait for the reduction, and enable the wrapper's hooks.

        Args:
            failure: where and why the step failed on this rank, for the other replicas; empty if that is not known,
                None if it did not fail.
            deadline: for the other replicas, on the monotonic clock.

        Raises:
            FailureError: if the step failed in another replica and not here. It is fatal if a replica is missing, as
                running collectives cannot be cancelled.
            Exception: another one, if the step failed here only now. All replicas have taken part.
        """

    def leaf(self, parameter: nn.Parameter) -> torch.Tensor:
        """The leaf of the autograd graph for a parameter."""
        return parameter

    def whole_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """This replica's gradient of the whole parameter, from steps without a reduction."""
        return parameter.grad

    def put_aside(self) -> Callable[[], None]:
        """Save unreduced gradients that are not in ``.grad``; returns a function that restores them."""
        return lambda: None

    def forget(self) -> None:  # noqa: B027 - most have none
        """Drop unreduced gradients that are not in ``.grad``, after a failed step of which they may be."""
