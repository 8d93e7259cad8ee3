"""Who waits for whom, in words, when a run of the abstract machine got stuck."""

from __future__ import annotations

from collections.abc import Sequence

from fastpipe.machine import Outcome, Transfer
from fastpipe.program import Program


def describe_cycle(program: Program, outcome: Outcome, lanes: Sequence[int]) -> str:
    """Follow who waits for whom from any blocked rank until a transfer comes again.

    Args:
        program: what was run.
        outcome: of a run that got stuck, of a program in which every send has its receive.
        lanes: the lane of every channel.
    """
    path: list[Transfer] = []
    lines: list[str] = []
    head, behind = _head_of(outcome, outcome.blocked[min(outcome.blocked)], lanes)
    while head not in path:
        peer = program.channels[head.channel].peer_of(head.rank)
        path.append(head)
        lines.append(_text(program, outcome, head, behind, peer))
        head, behind = _head_of(outcome, _what_holds_up(outcome, head, peer, lanes), lanes)
    return "ranks wait in a cycle: " + "; ".join(lines[path.index(head) :])


def _head_of(outcome: Outcome, transfer: Transfer, lanes: Sequence[int]) -> tuple[Transfer, Transfer]:
    """What stands at the head of the transfer's queue, and the transfer itself."""
    return outcome.queues[lanes[transfer.channel], transfer.rank][0], transfer


def _what_holds_up(outcome: Outcome, head: Transfer, peer: int, lanes: Sequence[int]) -> Transfer:
    """Why a peer does not answer a head: another transfer is at its own head, or it has not come that far."""
    queue = outcome.queues.get((lanes[head.channel], peer))
    return queue[0] if queue else outcome.blocked[peer]


def _text(program: Program, outcome: Outcome, head: Transfer, behind: Transfer, peer: int) -> str:
    blocked = outcome.blocked.get(head.rank)
    where = "" if blocked is None else f" (blocked in its wait for position {blocked.position})"
    instruction = program[head.rank][head.position]
    lane = "" if head is behind else f", ahead of position {behind.position} in the same lane,"
    text = program[head.rank].text(instruction)
    return f"rank {head.rank}{where}: position {head.position}, {text}{lane} waits for rank {peer}"
