"""What the bounds are made of: how long actions take at least, and the chains of them that microbatches go through."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np
import numpy.typing as npt

from fastpipe.action import ActionKind
from fastpipe.cost import CostModel
from fastpipe.placement import Placement
from fastpipe.program import Channel, ChannelKind
from fastpipe.schedule import Columns, Schedule

Floats = npt.NDArray[np.float64]
_SLACK = 1e-9
"""Of a limit that was computed: so much below a whole number of activations it still has room for them."""


@dataclass(frozen=True)
class Actions:
    """Seconds by stage and by rank. "Least" is over the actions that a schedule has, or that an order may have.

    Attributes:
        num_microbatches: of every route.
        forward: of a plain F, by stage, as all up to ``weight``.
        with_forward: least of an action that makes a stage's output.
        with_backward: least of one that makes the gradient of its input; empty of meaning where nothing is trained.
        to_the_end: least from the start of the stage's backward to the end of its W or B.
        after: least from the end of a stage's last backward, which is no fused pair, to the end of its W or B.
        backward: of all backward actions of one microbatch outside fused pairs: most for a schedule, least otherwise.
        release: least of an action that releases an activation.
        weight: what an activation counts in the memory limit.
        work: of all actions, by rank, as all that follow; least where the actions are not given.
        inputs: the same without W.
    """

    num_microbatches: tuple[int, ...]
    forward: Floats
    with_forward: Floats
    with_backward: Floats
    to_the_end: Floats
    after: Floats
    backward: Floats
    release: Floats
    weight: Floats
    work: Floats
    inputs: Floats
    limits: Floats
    trains: bool
    pairs: bool

    @classmethod
    def of_schedule(cls, schedule: Schedule, cost: CostModel) -> Actions:
        """Those of a schedule: all in all exactly, one by one as short as its kinds of action allow."""
        seconds = _Seconds(cost, schedule.placement)
        kinds = {ActionKind(int(kind)) for columns in schedule.columns for kind in np.unique(columns[0])}
        split, whole = ActionKind.I in kinds, ActionKind.B in kinds
        pairs = ActionKind.OVERLAP_F_B in kinds
        totals = np.array([seconds.total(columns) for columns in schedule.columns])
        return cls(
            _per_route(schedule.placement, schedule.num_microbatches),
            seconds.forward,
            *seconds.least(split, whole, pairs),
            # `inputs` has the whole of every B: where one may be the last, nothing is left to come on its stage
            np.where(_has_whole(schedule), 0.0, seconds.weight),
            np.maximum(seconds.split * split, seconds.whole * (whole or pairs)),
            seconds.least_release(split, whole, pairs),
            np.ones(schedule.num_stages),
            totals[:, 0],
            totals[:, 1],
            np.array([rank.peak_activations for rank in schedule], dtype=np.float64),
            split or whole or pairs,
            pairs,
        )

    @classmethod
    def of_placement(
        cls, placement: Placement, cost: CostModel, m: int, limits: Sequence[float], in_bytes: bool, fused: bool
    ) -> Actions:
        """The least that any order takes: B or I and W, and fused pairs where the cost has them."""
        seconds, counts = _Seconds(cost, placement), _per_route(placement, m)
        pairs = fused and cost.overlapped is not None
        backward = np.minimum(seconds.split, seconds.whole)
        first = np.minimum(seconds.input, seconds.whole)
        work, inputs = (seconds.least_work(counts, least, pairs) for least in (backward, first))
        with_forward, with_backward, to_the_end = seconds.least(True, True, pairs)
        weight, held = np.ones(placement.num_stages), np.array(limits)
        _check_room(placement, limits, cost.per_stage("stage_bytes", placement.num_stages) if in_bytes else weight)
        if in_bytes:
            weight, held = _least_bytes(cost, placement.num_stages, held)
        if (weight == weight[0]).all():  # of equal activations, a whole number fits
            held, weight = np.floor(held / weight[0] * (1 + _SLACK)), np.ones(placement.num_stages)
        return cls(
            counts,
            seconds.forward,
            with_forward,
            with_backward,
            to_the_end,
            to_the_end - with_backward,
            backward,
            seconds.least_release(True, True, pairs),
            weight,
            work,
            inputs,
            held,
            True,
            pairs,
        )

    @property
    def num_stages(self) -> int:
        """How many stages there are."""
        return len(self.forward)


def _check_room(placement: Placement, limits: Sequence[float], sizes: Floats) -> None:
    """Refuse a limit within which a rank cannot run a stage of its own at all: no order has a time to bound."""
    for limit, stages in zip(limits, placement.stages_by_rank(), strict=True):
        stage = max(stages, key=lambda one: float(sizes[one]))
        if limit * (1 + _SLACK) < sizes[stage]:
            raise ValueError(
                f"memory = {limit!r}: less than one activation of stage {stage}; give at least {sizes[stage]:g}"
            )


def _least_bytes(cost: CostModel, num_stages: int, limits: Floats) -> tuple[Floats, Floats]:
    """What an activation takes at any time of its life, and the limits that this leaves."""
    if not (cost.per_stage("stage_bytes", num_stages) > 0).all():
        raise ValueError("in_bytes: the cost's stage_bytes are not known for every stage; give them, all above 0")
    kept = cost.per_stage("kept_bytes", num_stages)
    if (kept > 0).all():
        return kept, limits
    return np.ones(num_stages), np.full_like(limits, inf)  # where something takes nothing, no number of it is too much


def _has_whole(schedule: Schedule) -> npt.NDArray[np.bool_]:
    """Of every stage, whether some of its backwards are B."""
    found = np.zeros(schedule.num_stages, dtype=np.bool_)
    for columns in schedule.columns:
        found[columns[1, columns[0] == ActionKind.B]] = True
    return found


def _per_route(placement: Placement, m: int) -> tuple[int, ...]:
    return (m,) if placement.num_routes == 1 else (m // 2, m - m // 2)


class _Seconds:
    """The cost's seconds by stage, with what fused pairs make of them."""

    def __init__(self, cost: CostModel, placement: Placement) -> None:
        count = placement.num_stages
        cost.check(count)
        self.placement = placement
        self.forward, self.input, self.weight, self.whole = (
            cost.per_stage(name, count) for name in ("forward", "backward_input", "backward_weight", "backward")
        )
        self.split = self.input + self.weight
        self.fused = None if cost.overlapped is None else cost.per_stage("overlapped", count)
        self.by_rank = [list(stages) for stages in placement.stages_by_rank()]

    def total(self, columns: Columns) -> tuple[float, float]:
        """Seconds of a rank's actions, and of those that are no W."""
        kinds, stages, pairs = columns[0], columns[1], columns[3]
        sums = [
            float(seconds[stages[kinds == kind]].sum())
            for kind, seconds in (
                (ActionKind.F, self.forward),
                (ActionKind.B, self.whole),
                (ActionKind.I, self.input),
                (ActionKind.W, self.weight),
            )
        ]
        mine = kinds == ActionKind.OVERLAP_F_B
        if self.fused is not None:
            sums.append(float(self.fused[stages[mine]].sum()))
        else:
            sums.append(float((self.forward[stages[mine]] + self.whole[pairs[mine]]).sum()))
        return sum(sums), sum(sums) - sums[3]

    def least(self, split: bool, whole: bool, pairs: bool) -> tuple[Floats, Floats, Floats]:
        """Least of an action with a stage's forward, with its backward, and from that to the end of W or B."""
        with_forward, pair = self.forward, self._pair() if pairs else np.full(len(self.forward), inf)
        if pairs and self.fused is not None:
            with_forward = np.minimum(self.forward, self.fused)
        inputs = np.minimum(self.input if split else inf, self.whole if whole else inf)
        ends = np.minimum(self.split if split else inf, self.whole if whole else inf)
        if not (split or whole or pairs):
            return with_forward, np.zeros(len(pair)), np.zeros(len(pair))
        return with_forward, np.minimum(inputs, pair), np.minimum(ends, pair)

    def least_release(self, split: bool, whole: bool, pairs: bool) -> Floats:
        """Least of a W, B or pair of the stage."""
        found = self._pair() if pairs else np.full(len(self.forward), inf)
        for there, seconds in ((split, self.weight), (whole, self.whole)):
            found = np.minimum(found, seconds) if there else found
        return found

    def _pair(self) -> Floats:
        """Least of a pair that has the stage's backward: its forward may be of any stage of the rank."""
        found = np.full(len(self.forward), inf)
        for stages in self.by_rank:
            if self.fused is not None:
                found[stages] = np.minimum(found[stages], self.fused[stages].min())
            else:
                found[stages] = np.minimum(found[stages], self.forward[stages].min() + self.whole[stages])
        return found

    def least_work(self, counts: Sequence[int], backward: Floats, pairs: bool) -> Floats:
        """Least of all F and backwards of each rank; a pair saves no more than with the longest backward there."""
        totals = []
        for routes in _by_rank(self.placement):
            held = [(stage, m) for stages, m in zip(routes, counts, strict=True) for stage in stages]
            longest = max(backward[stage] for stage, _ in held)
            total = 0.0
            for stage, m in held:
                saved = (
                    max(0.0, self.forward[stage] + longest - self.fused[stage])
                    if pairs and self.fused is not None
                    else 0
                )
                total += m * (self.forward[stage] + backward[stage] - saved)
            totals.append(total)
        return np.array(totals)


def _by_rank(placement: Placement) -> list[list[list[int]]]:
    """For every rank the stages that it holds, by route."""
    found: list[list[list[int]]] = [[[] for _ in placement.routes] for _ in range(placement.num_ranks)]
    for number, route in enumerate(placement.routes):
        for stage, rank in enumerate(route):
            found[rank][number].append(stage)
    return found


class Chains:
    """When, at the earliest, what starts and ends for one microbatch that nothing holds up; by route and stage.

    Attributes:
        forward: starts of F.
        forward_end: ends of F.
        backward: starts of the backward.
        backward_end: ends of its part for the input.
    """

    def __init__(self, placement: Placement, cost: CostModel, actions: Actions) -> None:
        self.forward: list[Floats] = []
        self.forward_end: list[Floats] = []
        self.backward: list[Floats] = []
        self.backward_end: list[Floats] = []
        for route in placement.routes:
            there, back = (_hops(route, cost, kind) for kind in (ChannelKind.ACTIVATION, ChannelKind.GRADIENT))
            back = back * actions.trains
            ends = np.cumsum(actions.with_forward) + np.concatenate([[0.0], np.cumsum(there)])
            self.forward.append(ends - actions.with_forward)
            self.forward_end.append(ends)
            reverse = np.cumsum(actions.with_backward[::-1]) + np.concatenate([[0.0], np.cumsum(back[::-1])])
            self.backward_end.append(ends[-1] + reverse[::-1])
            self.backward.append(self.backward_end[-1] - actions.with_backward)


def _hops(route: Sequence[int], cost: CostModel, kind: ChannelKind) -> Floats:
    """Seconds of the transfer across every boundary of stages."""
    found = []
    for stage, (here, after) in enumerate(zip(route, route[1:], strict=False)):
        ends, consumer = ((here, after), stage + 1) if kind == ChannelKind.ACTIVATION else ((after, here), stage)
        found.append(cost.transfer_seconds(Channel(*ends, kind), consumer))
    return np.array(found, dtype=np.float64)


@dataclass(frozen=True)
class RankView:
    """What the bounds ask of a rank, in seconds.

    Attributes:
        limited: whether it may hold less than all activations of the step.
        start: from time 0 to its first F.
        first_backward: from time 0 to its first backward.
        own_first_backward: from its first F to that.
        capacity: of F, as far as memory allows, before the first backward.
        work: of all its actions.
        forwards: of all its actions with an F.
        remaining: of the backwards that memory lets it leave for after its last F.
        tail: from the end of its last F to the end of the microbatch's backward on the first stage.
        own_tail: to its end on this rank.
        drain: from the end of the rank's last backward for an input, to the end of the first stage's backward.
        lives: of all its activations, from F to W, each at least, with what it cannot hold in ramping up and down.
    """

    trains: bool
    limited: bool
    limit: float
    start: float
    first_backward: float
    own_first_backward: float
    capacity: float
    work: float
    inputs: float
    forwards: float
    remaining: float
    tail: float
    own_tail: float
    drain: float
    lives: float


def rank_views(placement: Placement, chains: Chains, actions: Actions) -> list[RankView]:
    """The view of every rank."""
    return [_view(chains, actions, rank, routes) for rank, routes in enumerate(_by_rank(placement))]


def _view(chains: Chains, actions: Actions, rank: int, routes: list[list[int]]) -> RankView:
    held = [(n, stages) for n, stages in enumerate(routes) if stages and actions.num_microbatches[n]]
    ends = [(number, stages[0], stages[-1]) for number, stages in held]
    counted = [(stage, actions.num_microbatches[number]) for number, stages in held for stage in stages]
    finish = [chains.backward[number][0] + actions.to_the_end[0] for number in range(len(routes))]
    limit = float(actions.limits[rank])
    forward, back = chains.forward, chains.backward
    return RankView(
        actions.trains,
        sum(m * float(actions.weight[stage]) for stage, m in counted) > limit,
        limit,
        min(float(forward[n][first]) for n, first, _ in ends),
        min(float(back[n][last]) for n, _, last in ends),
        min(float(back[n][last] - forward[n][first]) for n, first, last in ends),
        min(
            capacity(actions, [stages for _, stages in held], limit),
            sum(m * float(actions.forward[s]) for s, m in counted),
        ),
        float(actions.work[rank]),
        float(actions.inputs[rank]),
        sum(m * float(actions.with_forward[stage]) for stage, m in counted),
        remaining(actions, counted, limit),
        min(float(finish[n] - chains.forward_end[n][last]) for n, _, last in ends),
        min(float(back[n][first] + actions.to_the_end[first] - chains.forward_end[n][last]) for n, first, last in ends)
        if actions.trains
        else 0.0,
        min(
            float(chains.backward_end[n][0] - chains.backward_end[n][first] + actions.after[0]) for n, first, _ in ends
        ),
        _lives(chains, actions, held, limit),
    )


def capacity(actions: Actions, routes: Sequence[Sequence[int]], limit: float) -> float:
    """The most seconds of F of which the activations fit into the limit.

    No stage of a route has run more often than the one before it, so the counts are a sum of prefixes of the stages:
    the best prefix decides.
    """
    best = 0.0
    for stages in routes:
        seconds, weights = np.cumsum(actions.forward[stages]), np.cumsum(actions.weight[stages])
        best = max(best, float((seconds / weights).max()))
    return limit * best if best > 0 else 0.0


def remaining(actions: Actions, counted: Sequence[tuple[int, int]], limit: float) -> float:
    """The most seconds of backwards of which the activations fit into the limit: the longest for their weight first."""
    left, total = limit, 0.0
    for stage, m in sorted(counted, key=lambda one: -actions.backward[one[0]] / actions.weight[one[0]]):
        share = min(m * float(actions.weight[stage]), left)
        total += share * float(actions.backward[stage] / actions.weight[stage])
        left -= share
    return total


def _lives(chains: Chains, actions: Actions, held: Sequence[tuple[int, list[int]]], limit: float) -> float:
    """Activation-seconds of all microbatches of a rank.

    A rank fills its memory one F after the other, and empties it one release after the other: with one kind of
    activation, k(k-1)/2 activation-seconds for a second each are not used. With pairs an action may do both at once,
    and only the filling is counted.
    """
    total = 0.0
    for number, stages in held:
        spans = chains.backward[number] + actions.to_the_end - chains.forward[number]
        total += actions.num_microbatches[number] * float((spans * actions.weight)[stages].sum())
    stages = [stage for _, some in held for stage in some]
    if limit < inf and actions.trains and (actions.weight == 1).all():
        ramp = float(actions.with_forward[stages].min())
        ramp += 0.0 if actions.pairs else float(actions.release[stages].min())
        whole = int(limit)
        total += whole * (whole - 1) / 2 * ramp
    return total
