"""Lower bounds: times that no order beats, for given costs and memory; docs/waves.md proves them.

`bounds` has those of a schedule, or of every order over a placement; `any_placement_bounds` those that hold wherever
the stages are. None is an estimate: a simulated result below one is an error, of the result or of the bound.

    >>> from fastpipe import CostModel, Placement
    >>> from fastpipe.bounds import best, bounds
    >>> best(bounds(Placement.wave(8, 4), CostModel(), num_microbatches=32, memory=20)).seconds
    403.0

The letters in the comments: m microbatches, k live stage activations, rank r; time 0 is the first start of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.checks import check_counts, check_flags, check_type, is_number, plain
from fastpipe.cost import CostModel, check_links
from fastpipe.placement import Placement
from fastpipe.schedule import Schedule
from fastpipe.theory.chains import Actions, Chains, RankView, rank_views
from fastpipe.theory.closed_forms import MEASURES as MEASURES
from fastpipe.theory.closed_forms import check_measure

Memory = float | Sequence[float] | None
"""Live stage activations of a rank (bytes, if asked for): for every rank, or one per rank; None for no limit."""

_CONTROLLABLE = "controllable memory, arXiv 2405.15362, section 4, with the order's own durations"
_ZERO_BUBBLE = "zero bubble, arXiv 2401.10241, appendix, for any placement: docs/waves.md"

_LIVES = "the time that activations live, over those that may live at once: docs/waves.md"


@dataclass(frozen=True)
class Bound:
    """A time that is not beaten.

    Attributes:
        name: what it is about, in a word or two.
        seconds: the least makespan, or span.
        source: where it is from.
    """

    name: str
    seconds: float
    source: str


def best(found: Sequence[Bound]) -> Bound:
    """The largest of them: the one that counts."""
    if not (isinstance(found, Sequence) and found and all(isinstance(bound, Bound) for bound in found)):
        raise TypeError(f"found = {found!r}: give what bounds() returns")
    return max(found, key=lambda bound: bound.seconds)


def bounds(
    work: Schedule | Placement,
    cost: CostModel | None = None,
    *,
    num_microbatches: int | None = None,
    memory: Memory = None,
    in_bytes: bool = False,
    fused: bool = True,
    measure: str = "makespan",
) -> list[Bound]:
    """What no order over a placement beats; for a schedule, no order of the same actions.

    Args:
        work: a placement, or a schedule: then the durations are those of its actions, and the memory is its own.
        cost: seconds per stage action and transfer; as for `fastpipe.simulate`.
        num_microbatches: m, for a placement.
        memory: what a rank may hold, for a placement; from F to the end of W or B.
        in_bytes: whether ``memory`` is bytes, of which an activation takes the cost's ``stage_bytes``, or the
            ``kept_bytes`` of one that is recomputed.
        fused: whether an order over the placement may have fused pairs, where the cost says what they take.
        measure: ``"makespan"`` or ``"span"``, see `Timeline`.

    Raises:
        ValueError: for numbers that do not fit together; it says which.
    """
    cost = _cost(cost)
    check_measure(measure)
    check_flags(in_bytes=in_bytes, fused=fused)
    check_type(Schedule | Placement, work=work)
    check_links(cost, work.num_ranks)
    if isinstance(work, Schedule):
        if num_microbatches is not None or memory is not None:
            raise ValueError("num_microbatches, memory: a schedule has its own; leave them out, or give its placement")
        placement, actions = work.placement, Actions.of_schedule(work, cost)
    else:
        placement = work
        limits = _limits(memory, placement.num_ranks)
        (m,) = check_counts(num_microbatches=num_microbatches)
        actions = Actions.of_placement(placement, cost, m, limits, in_bytes, fused)
    views = rank_views(placement, Chains(placement, cost, actions), actions)
    found = [_work(views), *(_makespan if measure == "makespan" else _span)(views, placement.num_routes == 1)]
    return [bound for bound in found if np.isfinite(bound.seconds)]


def _work(views: Sequence[RankView]) -> Bound:
    return Bound("work", max(view.work for view in views), "the busiest rank")


def _makespan(views: Sequence[RankView], _: bool) -> list[Bound]:
    """Every rank is idle from 0 to its first F, and up to its first backward but for what memory lets it do."""
    found = [
        Bound("ramp", max(v.start + v.work for v in views), "the first microbatch's way to each rank"),
        Bound(
            "chain", max(v.start + v.forwards + v.tail for v in views), "all F of a rank, and the last one's way back"
        ),
    ]
    if not all(view.trains for view in views):
        return found
    return [
        *found,
        Bound("warm-up", max(_idle(v) + v.work for v in views), _ZERO_BUBBLE),
        Bound("drain", max(_idle(v) + v.inputs + v.drain for v in views), _ZERO_BUBBLE),
        Bound("memory", _most(_idle(v) + v.work - v.remaining + v.tail for v in views if v.limited), _ZERO_BUBBLE),
        _held(views),
    ]


def _span(views: Sequence[RankView], one_route: bool) -> list[Bound]:
    """The same from a rank's own first start to its own last end.

    With one route, the rank of stage 0 starts first and ends with stage 0's last W: bounds that end there are its.
    """
    found = [
        Bound("chain", max(v.forwards + v.own_tail for v in views), "all F of a rank, and the last one's way back")
    ]
    if not all(view.trains for view in views):
        return found
    memory = [_own_idle(v) + v.work - v.remaining + v.own_tail for v in views if v.limited]
    if one_route:
        memory += [_idle(v) + v.work - v.remaining + v.tail for v in views if v.limited]
        found.append(
            Bound("first rank", max(v.start + v.forwards + v.tail for v in views), "its span holds all chains")
        )
    return [
        *found,
        Bound("warm-up", max(_own_idle(v) + v.work for v in views), _ZERO_BUBBLE),
        Bound("memory", _most(memory), _ZERO_BUBBLE),
        _held(views),
    ]


def _idle(view: RankView) -> float:
    """What a rank idles before its first backward: its way there, or what memory keeps it from filling."""
    return max(view.start, view.first_backward - view.capacity)


def _own_idle(view: RankView) -> float:
    return max(0.0, view.own_first_backward - view.capacity)


def _held(views: Sequence[RankView]) -> Bound:
    """An activation lives at least from its F to the end of its W; all their lives have to fit under the limit."""
    return Bound(
        "activation time",
        _most(v.lives / v.limit for v in views if v.limited),
        _LIVES,
    )


def _most(values: object) -> float:
    return max(values, default=float("-inf"))  # type: ignore[call-overload, no-any-return]


def any_placement_bounds(
    cost: CostModel | None = None,
    *,
    num_ranks: int,
    num_stages: int,
    num_microbatches: int,
    memory: float | None = None,
    in_bytes: bool = False,
    fused: bool = True,
    even: bool = False,
    measure: str = "makespan",
) -> list[Bound]:
    """What no order over any placement of the stages with one route beats. Arguments as for `bounds`, and:

    Args:
        cost: hops count by the latency of the fastest link.
        num_ranks: each holds at least one stage.
        num_stages: of the model.
        num_microbatches: m.
        memory: as for `bounds`, one number.
        in_bytes: as for `bounds`.
        fused: as for `bounds`.
        even: whether every rank holds as many stages; with it more is known by span.
        measure: as for `bounds`.

    Raises:
        ValueError: for numbers that do not fit together; it says which.
    """
    cost = _cost(cost)
    check_measure(measure)
    check_flags(in_bytes=in_bytes, fused=fused, even=even)
    num_ranks, num_stages, m = check_counts(
        num_ranks=num_ranks, num_stages=num_stages, num_microbatches=num_microbatches
    )
    if num_stages < num_ranks:
        raise ValueError(f"num_ranks = {num_ranks}, num_stages = {num_stages}: give each rank a stage at least")
    check_links(cost, num_ranks)
    if even and num_stages % num_ranks:
        raise ValueError(f"even: {num_stages} stages are not as many on each of {num_ranks} ranks; leave it out")
    limit = _limits(memory, 1)[0]
    whole = Placement.custom([0] * num_stages)
    actions = Actions.of_placement(whole, cost, m, [limit], in_bytes, fused)
    limit = float(actions.limits[0])  # in the unit of the weights: of equal activations, in whole ones
    hops = (num_ranks - 1) * _shortest_hop(cost, num_ranks)
    work = float(actions.work[0]) / num_ranks
    stages = m * (actions.forward + actions.backward) if not actions.pairs else np.zeros(num_stages)
    there, back = float(actions.with_forward.sum()) + hops, float(actions.with_backward[1:].sum()) + hops
    found = [
        Bound("work", max(work, float(stages.max())), "all work, shared out evenly; the longest stage"),
        Bound("chain", there + back + float(actions.to_the_end[0]), "one microbatch's way through the model and back"),
    ]
    if limit == inf:
        return found
    held = m * float((_lives(actions) * actions.weight).sum())
    found.append(Bound("activation time", held / (num_ranks * limit), _LIVES))
    # up to the first backward, which is the last stage's, the ranks do nothing but F, each within its memory
    fits = limit * float((actions.forward / actions.weight).max())
    if measure == "makespan":
        idle = there - min(fits, m * float(actions.forward.sum()) / num_ranks)
        found.append(Bound("warm-up", work + max(0.0, idle), _CONTROLLABLE))
    elif even:
        cheapest = np.sort(stages[1:])[: num_stages // num_ranks - 1]
        found.append(Bound("warm-up", float(stages[0] + cheapest.sum()) + max(0.0, there - fits), _CONTROLLABLE))
    return found


def _lives(actions: Actions) -> npt.NDArray[np.float64]:
    """How long an activation of each stage lives at least, hops left out."""
    after = [np.cumsum(seconds[::-1])[::-1] for seconds in (actions.with_forward, actions.with_backward)]
    return np.asarray(after[0] + after[1] - actions.with_backward + actions.to_the_end)


def _shortest_hop(cost: CostModel, p: int) -> float:
    """The latency of the fastest link; 0 for one rank."""
    links = [cost.link(a, b)[0] for a in range(p) for b in range(p) if a != b] if isinstance(cost.comm, dict) else None
    return min(links, default=0.0) if links is not None else float(cost.comm) * (p > 1)  # type: ignore[arg-type]


def _cost(cost: CostModel | None) -> CostModel:
    cost = CostModel() if cost is None else cost
    check_type(CostModel, cost=cost)
    return cost


def _limits(memory: Memory, num_ranks: int) -> list[float]:
    if memory is None:
        return [inf] * num_ranks
    given = plain(memory)
    values = given if isinstance(given, tuple) else (given,) * num_ranks
    if len(values) != num_ranks or not all(_is_limit(value) for value in values):
        raise ValueError(f"memory = {memory!r}: give one number above 0, or {num_ranks}, one per rank")
    return [float(value) for value in values]


def _is_limit(value: Any) -> bool:
    return value == inf or (is_number(value) and value > 0)
