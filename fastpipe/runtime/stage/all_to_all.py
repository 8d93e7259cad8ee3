"""`all_to_all`, and pairs of a forward and a backward that take turns at it.

Both halves of such a pair have a thread, but only the one that has the turn runs. A half that comes to an all-to-all
starts it, passes the turn, and waits for the rows when it has the turn again. So the rows travel while the other half
computes, without a method of the modules'. Two layers whose experts are on other ranks::

    backward  | combine >  |            | experts > |           | attention, combine > | ...
    forward   |            | attention >|           | experts > |                      | combine, attention > ...

where ``>`` starts an all-to-all. The backward begins, as its first piece is short; the forward does if the stage of the
backward has called no `all_to_all`.

**The order of collectives** of a pair depends on nothing but the halves themselves. Call what a half does between two
all-to-alls a piece. The pieces run one at a time, in an order that follows from their numbers alone: in turns, and
what is left of one half when the other has ended. Collectives are started in pieces, by any library, so they have one
order, and none starts while another thread could start one. Ranks of a group run the same program. If each half has
the same collectives on all of them, as it must for a step without pairs, then so has the pair. No rank waits forever
then: take the one that has started the fewest. What it waits for it has started, and so have all others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from fastpipe.runtime.common import torch_private

FORWARD, BACKWARD = 0, 1
_KEY = "fastpipe.turns"


def all_to_all(
    tensor: torch.Tensor,
    output_split_sizes: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    group: dist.ProcessGroup | None = None,
) -> torch.Tensor:
    """Exchange rows between the ranks of a group, like ``torch.distributed.all_to_all_single``, with a backward.

    In a pair of a forward and a backward (``OVERLAP_F_B``) of a pipeline whose mesh has a dimension for such groups,
    the other half of the pair computes while the rows travel. Outside of pairs it waits for them. The values are the
    same.

    Args:
        tensor: [rows, ...], those for the first rank first.
        output_split_sizes: number of rows that come from each rank; None for equal ones.
        input_split_sizes: number of rows for each rank; None for equal ones.
        group: the ranks; None for all processes. All of them must call it as often as each other, with no rows, too.

    Returns:
        [rows, ...], those of the first rank first.
    """
    if not _untraced:
        # not traced by torch.compile; made late, as this imports the compiler
        _untraced.append(torch.compiler.disable(_counted))  # type: ignore[no-untyped-call]
    return _untraced[0](tensor, output_split_sizes, input_split_sizes, group)


_untraced: list[Callable[..., torch.Tensor]] = []
"""At most one function. `functools.cache` would do the same, but torch.compile traces past it, and warns of it."""


def _counted(*args: Any) -> Any:
    _thread.num_calls += 1
    return _AllToAll.apply(*args)  # type: ignore[no-untyped-call]


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, received: Any, sent: Any, group: Any) -> torch.Tensor:
        ctx.back = sent, received, group
        return _exchange(tensor, received, sent, group)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        return _exchange(grad, *ctx.back), None, None, None


def _exchange(
    rows: torch.Tensor, received: Sequence[int] | None, sent: Sequence[int] | None, group: Any
) -> torch.Tensor:
    shape = rows.shape if received is None else (sum(received), *rows.shape[1:])
    found = rows.new_empty(shape)
    into, out_of = (None if sizes is None else list(sizes) for sizes in (received, sent))
    work: Any = dist.all_to_all_single(found, rows.contiguous(), into, out_of, group, async_op=True)
    turns = torch_private.find_in_thread(_KEY)
    if turns is not None:
        turns.pass_on()
    work.wait()
    return found


class _Thread(threading.local):
    num_calls = 0


_thread = _Thread()


def num_calls() -> int:
    """How often this thread has called `all_to_all`."""
    return _thread.num_calls


class OtherHalfError(Exception):
    """Ends a half of a pair when the other one has failed."""


class Turns:
    """The turns of one pair.

    Args:
        first: the half that begins, `FORWARD` or `BACKWARD`.
    """

    def __init__(self, first: int) -> None:
        self._changed = threading.Condition()
        self._turn = first
        self._has_ended = False  # one of them
        self._has_failed = False

    def run(self, half: int, call: Callable[[], None]) -> None:
        """Run a half in this thread when it has the turn.

        If the other one fails, this one ends at its next all-to-all, as peers may not take part in it, and does not
        raise.
        """
        try:
            with self._changed:
                self._wait(half)
            with torch_private.noted_in_thread(_KEY, self):
                call()
        except BaseException as error:  # raised again, unless it is a consequence
            if not self._fail() or not isinstance(error, Exception):
                raise
        finally:
            with self._changed:
                self._has_ended = True
                self._give(1 - half)

    def pass_on(self) -> None:
        """Called by the half that has the turn: wait while the other half runs until it does the same, or ends.

        Raises:
            OtherHalfError: if it failed.
        """
        with self._changed:
            half = self._turn
            if not self._has_ended:
                self._give(1 - half)
            self._wait(half)

    def _give(self, half: int) -> None:
        self._turn = half
        self._changed.notify_all()

    def _wait(self, half: int) -> None:
        self._changed.wait_for(lambda: self._turn == half or self._has_failed)
        if self._has_failed:
            raise OtherHalfError("the other half of the pair failed")

    def _fail(self) -> bool:
        """Note a failure; returns whether there was one before."""
        with self._changed:
            before, self._has_failed = self._has_failed, True
            self._changed.notify_all()
            return before
