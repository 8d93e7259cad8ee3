"""Closed forms: bubble, peak activations and lower bounds of the schedules, with their range of validity and source.

Costs here are seconds of one *rank's* share of the model for one microbatch: ``forward`` F, ``backward_input`` I,
``backward_weight`` W, B = I + W, ``overlapped`` F&B (F + B unless given); a stage of a rank with v stages takes 1/v of
them. `CostModel` counts per stage action: divide by v to simulate the same. ``comm`` is the latency of one hop.

    >>> from fastpipe import formulas
    >>> round(formulas.bubble("1f1b", num_ranks=4, num_microbatches=8), 4)
    0.2727

Sources: GPipe arXiv 1811.06965; Megatron 2104.04473; breadth-first 2211.05953; zero bubble 2401.10241; controllable
memory 2405.15362; DualPipe 2412.19437 and its repository; Chimera 2107.06925. `bubble_formula` and `peak_formula` tell
the range and the source of each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from fastpipe.checks import check_counts, is_whole, plain
from fastpipe.cost import LARGEST, is_cost
from fastpipe.theory.closed_forms import BUBBLES, PEAKS, Case, Formula, check_measure, mean_busy
from fastpipe.theory.closed_forms import MEASURES as MEASURES

FORMS = ("fraction", "seconds", "total")

_OPEN = {
    "interleaved_1f1b": 2,
    "looped_bfs": 2,
    "interleaved_zb": 2,
    "interleaved_overlap": 2,
    "hanayo": 2,
    "wave_zb": 4,
}
"""Schedules that leave the stages per rank open, and how many it is unless given."""
_COUNTS = ("num_ranks", "num_microbatches", "stages_per_rank", "live")
"""Arguments that are whole numbers of at least 1."""
_COST = f"costs are finite numbers from 0 to {LARGEST:g}"
_OTHERS = {
    "live_fraction": "give a finite fraction of 1F1B's memory, at least 0",
    "busiest": f"give the seconds of the busiest rank, from 0 to {LARGEST:g}",
}
"""What to give for numbers that are no costs."""
_VS = ("zbv", "v_half", "v_min", "1f1b_v", "dualpipev")


def bubble(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    comm: float = 0.0,
    overlapped: float | None = None,
    measure: str = "makespan",
    as_: str = "fraction",
) -> float:
    """How long the ranks idle, on average over the ranks.

    Args:
        name: a schedule.
        num_ranks: p.
        num_microbatches: m.
        stages_per_rank: v, for schedules that leave it open; unless given 2, and 4 for wave_zb.
        forward: F, seconds of a rank's share of the model, as all that follow.
        backward_input: I.
        backward_weight: W.
        comm: seconds of one hop between ranks.
        overlapped: F&B; F + I + W unless given. A pair that takes less than either part can be simulated alone.
        measure: ``"makespan"``, or ``"span"``: see `Timeline`.
        as_: ``"fraction"`` of the measure, ``"seconds"``, or ``"total"``, the measure itself in seconds.

    Raises:
        ValueError: where no closed form is known, or outside its range; it names the range.
    """
    if as_ not in FORMS:
        raise ValueError(f"as_ = {as_!r}: use one of {', '.join(FORMS)}")
    F, I, W, c, fused = _check_numbers(
        forward=forward,
        backward_input=backward_input,
        backward_weight=backward_weight,
        comm=comm,
        overlapped=0.0 if overlapped is None else overlapped,
    )
    # summed as Case sums it, so that it is exactly F + B
    fused = F + (I + W) if overlapped is None else fused
    formula = bubble_formula(name, measure)
    case = _case(name, formula, num_ranks, num_microbatches, stages_per_rank, F, I, W, c, fused)
    idle, busy = float(formula.value(case)), mean_busy(name, case)
    return {"seconds": idle, "total": idle + busy, "fraction": idle / (idle + busy) if idle else 0.0}[as_]


def bubble_formula(name: str, measure: str = "makespan") -> Formula:
    """The closed form of a schedule's idle seconds, with its range and source.

    Raises:
        ValueError: where none is known.
    """
    check_measure(measure)
    if not isinstance(name, str) or (name, measure) not in BUBBLES:
        raise _unknown(name, f"bubble by {measure}", (known for known, by in BUBBLES if by == measure))
    return BUBBLES[name, measure]


def peak_activations(
    name: str,
    *,
    num_ranks: int,
    num_microbatches: int,
    stages_per_rank: int | None = None,
    as_: str = "stages",
) -> float:
    """Live activations of the rank that holds most, released at the end of W.

    Args:
        name: a schedule.
        num_ranks: p.
        num_microbatches: m.
        stages_per_rank: v, for schedules that leave it open; 2 unless given.
        as_: ``"stages"`` counts stage activations; ``"ratio"`` compares with 1F1B, which holds p of a rank's share.

    Raises:
        ValueError: where no closed form is known, or outside its range; it names the range.
    """
    if as_ not in ("stages", "ratio"):
        raise ValueError(f"as_ = {as_!r}: use 'stages' or 'ratio'")
    formula = peak_formula(name)
    case = _case(name, formula, num_ranks, num_microbatches, stages_per_rank)
    peak = formula.value(case)
    return peak if as_ == "stages" else peak / (case.p * case.v)


def memory_ratio(first: str, second: str, **numbers: Any) -> float:
    """Peak activation memory of one schedule over that of another, for the same model on the same ranks.

    Args:
        first: a schedule.
        second: another.
        numbers: as for `peak_activations`; ``stages_per_rank`` goes to those that leave it open.
    """
    stages = numbers.pop("stages_per_rank", None)

    def ratio(name: str) -> float:
        mine = stages if name in list(_OPEN) else None  # a list takes what has no hash, which is refused below
        return peak_activations(name, stages_per_rank=mine, as_="ratio", **numbers)

    return ratio(first) / ratio(second)


def smallest_num_microbatches(name: str, fraction: float, *, num_ranks: int, **costs: Any) -> int:
    """The smallest m with which a schedule's bubble is at most ``fraction``, within the range of its formula.

    Args:
        name: a schedule.
        fraction: of the measure, above 0 and below 1.
        num_ranks: p.
        costs: as for `bubble`, but for ``as_``.

    Raises:
        ValueError: when no m does; outside the range of the formula at every m, what `bubble` says.
    """
    fraction = plain(fraction)
    if not (is_cost(fraction) and 0 < fraction < 1):
        raise ValueError(f"fraction = {fraction!r}: give one above 0 and below 1")
    if costs.pop("as_", "fraction") != "fraction":
        raise ValueError("as_: the bubble is compared with fraction; leave as_ out")
    (num_ranks,) = _check_numbers(num_ranks=num_ranks)

    def reaches(m: int) -> bool:
        return bubble(name, num_ranks=num_ranks, num_microbatches=m, **costs) <= fraction

    # Every formula falls with m; all but Chimera's, which holds for m = p alone, hold for every multiple of 2p.
    period = 2 * num_ranks
    if name == "chimera":
        if reaches(num_ranks):
            return num_ranks
        raise ValueError(f"fraction = {fraction}: the formula of chimera holds for m = p = {num_ranks}, and gives more")
    high = 1
    while not reaches(period * high):
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(period * middle) else (middle, high)
    return next(m for m in range(period * low + 1, period * high + 1) if _holds(reaches, m))


def _holds(reaches: Callable[[int], bool], m: int) -> bool:
    """Whether m reaches the fraction; False outside the range."""
    try:
        return reaches(m)
    except ValueError:
        return False


def ramp_bound(
    busiest: float,
    *,
    num_ranks: int,
    stages_per_rank: int = 1,
    forward: float = 1.0,
    comm: float = 0.0,
    num_routes: int = 1,
) -> float:
    """A makespan that no order beats: the work of the busiest rank, and the way of the first microbatch to the last.

    Args:
        busiest: seconds of compute of the busiest rank, with the schedule's own durations. Where not all
            ranks are as busy, as they have other stages, or fused pairs take less than their parts: give the work of
            the rank of stage p - 1, or of a middle rank with two routes, whose first forward comes this late.
        num_ranks: p.
        stages_per_rank: v; the first p stages are on p ranks.
        forward: F.
        comm: seconds of one hop.
        num_routes: 2 for a bidirectional placement, where every rank is at most p/2 - 1 hops from an end.

    Raises:
        ValueError: for an argument that is no such number; it names it.
    """
    busiest, num_ranks, stages_per_rank, forward, comm = _check_numbers(
        busiest=busiest, num_ranks=num_ranks, stages_per_rank=stages_per_rank, forward=forward, comm=comm
    )
    if not (is_whole(num_routes, least=1) and num_routes <= 2):
        raise ValueError(f"num_routes = {num_routes!r}: give 1, or 2 for a bidirectional placement")
    if num_routes == 2:
        return busiest + max(0.0, num_ranks / 2 - 1) * (forward + comm)
    return busiest + (num_ranks - 1) * (forward / stages_per_rank + comm)


def single_stage_bound(
    *,
    num_ranks: int,
    num_microbatches: int,
    live: int,
    forward: float = 1.0,
    backward_input: float = 1.0,
    backward_weight: float = 1.0,
    comm: float = 0.0,
) -> float:
    """A span that no order with one stage per rank and at most ``live`` activations beats (arXiv 2401.10241, extended).

    Raises:
        ValueError: for m <= live, where the memory is no limit; for an argument that is no number, naming it.
    """
    p, m, k = _check_numbers(num_ranks=num_ranks, num_microbatches=num_microbatches, live=live)
    F, I, W, c = _check_numbers(
        forward=forward, backward_input=backward_input, backward_weight=backward_weight, comm=comm
    )
    if m <= k:
        raise ValueError(f"num_microbatches = {m}: the bound holds for more than live = {k}")
    ramp = max(0.0, (p - 1) * (I + 2 * c) + (p - k) * F)
    return float(m * (F + I + W) + ramp + max(0.0, (p - 1) * (F + I + 2 * c) - (k - 1) * (I + W)))


def memory_bubble_bound(live_fraction: float, *, num_ranks: int, forward: float = 1.0) -> float:
    """Idle seconds that no placement avoids with a fraction of 1F1B's activation memory (arXiv 2405.15362).

    Raises:
        ValueError: for an argument that is no such number; it names it.
    """
    fraction, p, F = _check_numbers(live_fraction=live_fraction, num_ranks=num_ranks, forward=forward)
    return float(max(0.0, (1 - fraction) * p * F))


def v_bubble_bound(live: int, *, num_ranks: int, unit: float = 1.0) -> float:
    """Idle seconds of the span that no order on a V of two stages avoids with ``live`` stage activations.

    Args:
        live: stage activations of the rank that holds most.
        num_ranks: p.
        unit: seconds of F = I = W of a *stage*.
    """
    return wave_bubble_bound(live, num_ranks=num_ranks, stages_per_rank=2, unit=unit, measure="span")


def wave_bubble_bound(
    live: int, *, num_ranks: int, stages_per_rank: int, unit: float = 1.0, measure: str = "makespan"
) -> float:
    """Idle seconds that no order over a wave avoids with ``live`` stage activations, at F = I = W and free transfers.

    docs/waves.md proves it for even ``stages_per_rank`` and more microbatches than ``live`` / ``stages_per_rank``; the
    schedule wave_zb attains the makespan's from half of 1F1B's memory on.

    Args:
        live: stage activations of the rank that holds most.
        num_ranks: p.
        stages_per_rank: v, even.
        unit: seconds of F = I = W of a *stage*.
        measure: ``"makespan"`` or ``"span"``.

    Raises:
        ValueError: for an argument that is no such number, or an odd ``stages_per_rank``; it names it.
    """
    k, p, v, unit = _check_numbers(live=live, num_ranks=num_ranks, stages_per_rank=stages_per_rank, unit=unit)
    if v % 2:
        raise ValueError(f"stages_per_rank = {v}: the closed form is for even numbers; see fastpipe.bounds")
    check_measure(measure)
    stages = p * v
    before, after = p - 1 + max(0, stages - k), stages + p - 2 * k
    slots = before + max(0, after) if measure == "makespan" else max(0, before + after, stages - k)
    return float(unit * slots)


def full_throughput_memory(*, forward: float = 1.0, backward_input: float = 1.0, backward_weight: float = 1.0) -> float:
    """The fraction of 1F1B's activation memory below which no steady state keeps every rank busy; 1/3 at F = I = W.

    Raises:
        ValueError: for an argument that is no number, naming it, or if all are 0.
    """
    F, I, W = _check_numbers(forward=forward, backward_input=backward_input, backward_weight=backward_weight)
    if not F + I + W:
        raise ValueError("forward, backward_input, backward_weight = 0: give one of them above 0")
    return float((F + I) / (2 * (F + I + W)))


def peak_formula(name: str) -> Formula:
    """The closed form of a schedule's peak activations, with its range and source.

    Raises:
        ValueError: where none is known.
    """
    if not isinstance(name, str) or name not in PEAKS:
        raise _unknown(name, "peak activations", PEAKS)
    return PEAKS[name]


def _unknown(name: str, what: str, known: Iterable[str]) -> ValueError:
    names = ", ".join(dict.fromkeys(known))
    return ValueError(f"name = {name!r}: no closed form of its {what} is known; there is one for {names}")


def _stages(name: str, stages_per_rank: int | None) -> int:
    """v of a schedule: given where it is open, else its own."""
    own = _OPEN.get(name, 2 if name in _VS else 1)
    if stages_per_rank is None:
        return own
    (given,) = check_counts(stages_per_rank=stages_per_rank)
    if name not in _OPEN and given != own:
        raise ValueError(f"stages_per_rank = {given}: {name} has {own}; leave it out")
    return given


def _check_numbers(**numbers: Any) -> list[Any]:
    """The numbers as Python's own, which do not overflow.

    Refuses, by name, what is no count where one is meant, and what is no cost elsewhere.
    """
    numbers = {what: plain(number) for what, number in numbers.items()}
    for what, number in numbers.items():
        if what in _COUNTS:
            check_counts(**{what: number})
        elif not is_cost(number):
            raise ValueError(f"{what} = {number!r}: {_OTHERS.get(what, _COST)}")
    return list(numbers.values())


def _case(name: str, formula: Formula, p: int, m: int, v: int | None, *costs: float) -> Case:
    """The numbers that a formula is asked for, within its range."""
    p, m = check_counts(num_ranks=p, num_microbatches=m)
    case = Case(p, m, _stages(name, v), *costs)
    if not formula.holds(case):
        raise ValueError(
            f"the formula of {name} holds for {formula.range}; asked for p = {case.p}, m = {case.m}, v = {case.v}, "
            f"F = {case.F}, I = {case.I}, W = {case.W}, F&B = {case.FB}, comm = {case.c}: simulate it instead"
        )
    return case
