"""Why a figure falls short of its aim: where the time of a step goes, from the spans that the executor records.

Two views, in seconds by part. *Of a rank*: every instruction of its program goes to one part, and what is left of the
step is around the loop, so the parts add up to the step. *Of the critical path*: what the makespan consists of, so the
parts add up to the makespan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tables import quartiles

from fastpipe import Timeline
from fastpipe.program import Op

Parts = Mapping[str, float]

MODULE, AUTOGRAD, WAITING, MESSAGES, AROUND = "module call", "autograd", "waiting", "messages", "around the loop"
SLEEP, WAKE_UP, LOOP = "sleep", "wake-up", "loop"

_PART_OF = {
    Op.F: MODULE,
    Op.B: AUTOGRAD,
    Op.I: AUTOGRAD,
    Op.W: AUTOGRAD,
    Op.OVERLAP_F_B: AUTOGRAD,
    Op.WAIT_RECV: WAITING,
    Op.WAIT_SEND: WAITING,
}
"""The others move something, or free it."""


@dataclass(frozen=True)
class Aim:
    """What a figure has to reach.

    Attributes:
        what: the figure.
        limit: the most that it may be, or the least.
        at_least: which of the two.
    """

    what: str
    limit: float
    at_least: bool = False

    def missed(self, values: Sequence[float]) -> str | None:
        """What is short, in words, when the median is."""
        found = quartiles(values)[1]
        if found >= self.limit if self.at_least else found <= self.limit:
            return None
        return f"{self.what} is {found:.3f} and should be at {'least' if self.at_least else 'most'} {self.limit:g}"


def of_rank(timeline: Timeline, rank: int, seconds: float) -> Parts:
    """Where a rank's step went.

    Args:
        timeline: of the step.
        rank: which one.
        seconds: that the step took on this rank.
    """
    # an instruction lasts until the next one begins: the end of a SEND is that of its transfer
    starts = timeline.starts[rank].tolist()
    ends = [*starts[1:], float(timeline.ends[rank][-1])]
    parts: Counter[str] = Counter()
    for instruction, start, end in zip(timeline.program[rank], starts, ends, strict=True):
        parts[_PART_OF.get(instruction.op, MESSAGES)] += end - start
    parts[AROUND] = seconds - sum(parts.values())
    return parts


def of_path(timeline: Timeline, sleeps: Sequence[Sequence[tuple[float, float]]]) -> Parts:
    """What the makespan consists of.

    Args:
        timeline: of the step, of all ranks.
        sleeps: by rank, the start and end of what its stages slept. A fused pair counts as asleep all the time.
    """
    parts: Counter[str] = Counter()
    before, moved = timeline.start, False
    for span in timeline.critical_path():
        parts[WAKE_UP if moved else LOOP] += span.start - before
        moved = span.instruction.op == Op.SEND
        length = span.end - span.start
        if moved:
            parts[MESSAGES] += length
        else:
            inside = sum(end - start for start, end in sleeps[span.rank] if span.start <= start and end <= span.end)
            asleep = length if span.instruction.op == Op.OVERLAP_F_B else inside
            parts[SLEEP] += asleep
            parts[_PART_OF[span.instruction.op]] += length - asleep
        before = span.end
    return parts


def medians(found: Sequence[Parts]) -> Parts:
    """Part by part."""
    names = dict.fromkeys(name for parts in found for name in parts)
    return {name: quartiles([parts.get(name, 0.0) for parts in found])[1] for name in names}


def more(parts: Parts, base: Parts) -> Parts:
    """By how much each part is more than in what it is compared with; the largest first."""
    over = {name: parts.get(name, 0.0) - base.get(name, 0.0) for name in {**parts, **base}}
    return dict(sorted(over.items(), key=lambda part: -part[1]))


def explained(over: Parts, scale: float, unit: str, digits: int = 1) -> str:
    """In words: the parts, and which is the most of it."""
    listed = ", ".join(f"{name} {scale * value:+.{digits}f}" for name, value in over.items())
    return f"{scale * sum(over.values()):+.{digits}f} {unit}: {listed}; mostly {max(over, key=lambda name: over[name])}"
