"""The table of closed forms behind `fastpipe.formulas`: what each gives, where it holds, and where it is from.

Where the source gives a form for large numbers of microbatches alone, the range is the one in which simulation agrees
exactly. Idle time is seconds on average over the ranks; peaks are stage activations of the rank that holds most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

MEASURES = ("makespan", "span")


def check_measure(measure: str) -> None:
    """Refuse what is no measure."""
    if measure not in MEASURES:
        raise ValueError(f"measure = {measure!r}: use one of {', '.join(MEASURES)}")


@dataclass(frozen=True)
class Case:
    """The numbers that a formula is asked for, in the letters of the papers.

    Attributes:
        p: ranks.
        m: microbatches.
        v: stages per rank.
        F: seconds of a forward of one rank's share of the model, as all that follow.
        I: of a backward for the input.
        W: of a backward for the weights.
        c: of a hop between ranks.
        FB: of a fused forward and backward.
    """

    p: int
    m: int
    v: int = 1
    F: float = 1.0
    I: float = 1.0
    W: float = 1.0
    c: float = 0.0
    FB: float = 3.0

    @property
    def B(self) -> float:  # noqa: N802 - the field's own name
        """Seconds of a full backward."""
        return self.I + self.W

    @property
    def busy(self) -> float:
        """Seconds of compute of a rank without fused pairs."""
        return self.m * (self.F + self.B)

    @property
    def equal(self) -> bool:
        """Whether F = I = W and transfers are free."""
        return self.F == self.I == self.W and self.c == 0

    @property
    def light_weights(self) -> bool:
        """Whether W takes no longer than F and than I."""
        return min(self.F, self.I) >= self.W


@dataclass(frozen=True)
class Formula:
    """One closed form.

    Attributes:
        value: what it gives.
        range: where it holds, in words.
        holds: whether it holds for a case.
        source: where it is from.
    """

    value: Callable[[Case], float]
    range: str
    holds: Callable[[Case], bool]
    source: str


def _free(x: Case) -> bool:
    return x.c == 0


def _fused(x: Case) -> bool:
    """Whether a fused pair takes no less than either part, and no more than both: a shorter one has others wait."""
    return max(x.F, x.B) <= x.FB <= x.F + x.B


_ANY = "comm = 0"
_FUSED = "max(F, B) <= F&B <= F + B"
_TWICE = "m >= 2p, F = I = W, comm = 0"
_MEGATRON = "Megatron, arXiv 2104.04473, section 2.2"
_ZERO = "zero bubble, arXiv 2401.10241, section 2"
_ZBV = "zero bubble, arXiv 2401.10241, section 6"
_MEMORY = "controllable memory, arXiv 2405.15362, section 4"
_DUALPIPE = "deepseek-ai's DualPipe repository, README"
_OVERLAP = "PP-Schedule-Visualization, README"


def _equal_twice(x: Case) -> bool:
    return x.equal and x.m >= 2 * x.p


def _ramp(x: Case) -> float:
    return (x.p - 1) * (x.F + x.B) / x.v


def _zb_h1(x: Case) -> float:
    if x.m <= x.p:
        return (x.m + x.p - 1) * (x.F + x.I) + x.W - x.busy
    return (x.p - 1) * max(x.F, x.I, x.F + x.I - x.W)


def _v_block(live: Callable[[int], int], extra: Callable[[int], int]) -> Callable[[Case], float]:
    """3p(1-k)t - t/2 for the live fraction k = live / p, and what the reference's order adds."""
    return lambda x: x.F * (3 * (x.p - live(x.p)) - 0.5 + extra(x.p))


def _half(p: int) -> int:
    return (p + 2) // 2


def _third(p: int) -> int:
    return (p + 4) // 3


_V_HALF = Formula(
    _v_block(_half, lambda p: 0),
    f"p >= 3, {_TWICE}",
    lambda x: x.p >= 3 and _equal_twice(x),
    _MEMORY,
)
_V_MIN = Formula(
    _v_block(_third, lambda p: 2 if p % 3 == 2 else 0),
    f"p >= 3, {_TWICE}; 2t more than the paper's where p mod 3 = 2",
    lambda x: x.p >= 3 and _equal_twice(x),
    f"{_MEMORY}; the 2t: measured on its reference's order",
)
_INTERLEAVED_ZB = Formula(
    lambda x: (x.p - 1) * (x.F + x.I - x.W) / x.v,
    "m >= p, W <= min(F, I), comm = 0",
    lambda x: x.m >= x.p and x.light_weights and _free(x),
    f"{_ZERO}, over the stages of an interleaved rank",
)

BUBBLES: dict[tuple[str, str], Formula] = {
    ("gpipe", "makespan"): Formula(
        lambda x: (x.p - 1) * (x.F + x.B + 2 * x.c),
        "comm <= min(F, B)",
        lambda x: x.c <= min(x.F, x.B),
        "GPipe, arXiv 1811.06965, section 2.3",
    ),
    ("1f1b", "makespan"): Formula(_ramp, _ANY, _free, _MEGATRON),
    ("interleaved_1f1b", "makespan"): Formula(_ramp, "m >= p, comm = 0", lambda x: x.m >= x.p and _free(x), _MEGATRON),
    ("looped_bfs", "makespan"): Formula(
        _ramp, "m >= p, comm = 0", lambda x: x.m >= x.p and _free(x), "breadth-first, arXiv 2211.05953, section 4"
    ),
    ("zb_h1", "makespan"): Formula(
        _zb_h1,
        "comm = 0 and m >= 2p, or m <= p with W <= min(F, I)",
        lambda x: _free(x) and (x.m >= 2 * x.p or (x.m <= x.p and x.light_weights)),
        _ZERO,
    ),
    ("zb_h1", "span"): Formula(
        lambda x: (x.p - 1) * (max(x.I, x.F + x.I - x.W) + 4 * x.c),
        "m >= 2p; with comm > 0 also W <= min(F, I) and comm <= W / 2",
        lambda x: x.m >= 2 * x.p and (_free(x) or (x.light_weights and 2 * x.c <= x.W)),
        _ZERO,
    ),
    ("zb_h2", "makespan"): Formula(lambda x: (x.p - 1) * x.F, _TWICE, _equal_twice, _ZERO),
    ("zb_h2", "span"): Formula(
        lambda x: (x.p - 1) * max(0.0, x.F + x.I - 2 * x.W + 2 * x.c),
        "m >= 2p, comm <= W <= min(F, I)",
        lambda x: x.m >= 2 * x.p and x.light_weights and x.c <= x.W,
        _ZERO,
    ),
    ("interleaved_zb", "makespan"): _INTERLEAVED_ZB,
    ("interleaved_zb", "span"): _INTERLEAVED_ZB,
    ("zbv", "makespan"): Formula(lambda x: (x.p - 1) * x.F / 2, _TWICE, _equal_twice, _ZBV),
    ("zbv", "span"): Formula(lambda x: 0.0, _TWICE, _equal_twice, _ZBV),
    ("wave_zb", "makespan"): Formula(
        lambda x: (x.p - 1) * x.F / x.v,
        "v even, m >= p, F = I = W, comm = 0, with 1F1B's memory",
        lambda x: x.v % 2 == 0 and x.m >= x.p and x.equal,
        "docs/waves.md: no order over a wave has less",
    ),
    ("v_half", "makespan"): _V_HALF,
    ("v_half", "span"): _V_HALF,
    ("v_min", "makespan"): _V_MIN,
    ("v_min", "span"): _V_MIN,
    ("1f1b_v", "makespan"): Formula(
        lambda x: x.F * (2.5 * (x.p - 1) - (1 if x.p % 3 == 2 else 0)),
        f"p mod 3 = 1, or p mod 3 = 2 and p >= 5; {_TWICE}",
        lambda x: (x.p % 3 == 1 or (x.p % 3 == 2 and x.p >= 5)) and _equal_twice(x),
        "measured on the order of arXiv 2405.15362's code",
    ),
    ("1f1b_overlap", "makespan"): Formula(
        lambda x: x.p * (x.F + x.B) + (x.m - 1) * x.FB - mean_busy("1f1b_overlap", x),
        f"m >= 2p, {_FUSED}, comm = 0",
        lambda x: x.m >= 2 * x.p and _fused(x) and _free(x),
        _OVERLAP,
    ),
    ("interleaved_overlap", "makespan"): Formula(
        lambda x: (
            x.p * (x.F + x.B) + (x.m * x.v - x.p * (x.v - 1) - 1) * x.FB / x.v - mean_busy("interleaved_overlap", x)
        ),
        f"m a multiple of p, at least 2p; {_FUSED}, comm = 0",
        lambda x: x.m % x.p == 0 and x.m >= 2 * x.p and _fused(x) and _free(x),
        _OVERLAP,
    ),
    ("dualpipe", "makespan"): Formula(
        lambda x: (x.p / 2 - 1) * (x.FB + x.B - 3 * x.W) + min(_busy("dualpipe", x)) - mean_busy("dualpipe", x),
        f"p and m even, {_FUSED}, {_TWICE}",
        lambda x: x.p % 2 == x.m % 2 == 0 and _fused(x) and _equal_twice(x),
        _DUALPIPE,
    ),
    ("dualpipev", "makespan"): Formula(
        lambda x: (x.p - 1) * (x.FB + x.B - 3 * x.W) / 2 + min(_busy("dualpipev", x)) - mean_busy("dualpipev", x),
        f"{_FUSED}, {_TWICE}",
        lambda x: _fused(x) and _equal_twice(x),
        _DUALPIPE,
    ),
    ("chimera", "makespan"): Formula(
        lambda x: (x.p - 2) * x.B,
        "p even, m = p, B = F or B = 2F, comm = 0",
        lambda x: x.p % 2 == 0 and x.m == x.p and x.B in (x.F, 2 * x.F) and _free(x),
        "Chimera, arXiv 2107.06925, table 2: (p-2)/(2m+p-2) at B = F, (p-2)/(1.5m+p-2) at B = 2F",
    ),
}
_SPANS_THE_STEP = (
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "looped_bfs",
    "1f1b_overlap",
    "interleaved_overlap",
    "dualpipe",
    "dualpipev",
    "chimera",
)
"""Where one rank starts first and ends last, so that both measures are the same."""
BUBBLES |= {(name, "span"): BUBBLES[name, "makespan"] for name in _SPANS_THE_STEP}


def _first_group(x: Case) -> int:
    """Microbatches of the largest, first group of an interleaved schedule."""
    return -(-x.m // max(1, x.m // x.p))


def _warm_ups(name: str, x: Case) -> list[int]:
    """Forwards before the first fused pair, on every rank."""
    chunked = (x.v - 1) * _first_group(x) if name == "interleaved_overlap" else 0
    return [min(2 * (x.p - 1 - rank) + chunked + 1, x.m * x.v) for rank in range(x.p)]


def _fused_pairs(name: str, x: Case) -> list[int]:
    """Fused pairs, on every rank."""
    if name in ("1f1b_overlap", "interleaved_overlap"):
        return [x.m * x.v - warm_up for warm_up in _warm_ups(name, x)]
    if name == "dualpipe":
        heights = [min(rank, x.p - 1 - rank) for rank in range(x.p)]
        return [x.m - 2 * x.p + x.p // 2 + (h + 1) - (h + 1 == x.p // 2) for h in heights]
    if name == "dualpipev":
        return [2 * x.m - 3 * x.p + (rank + 1) - (rank + 1 == x.p) for rank in range(x.p)]
    return [0] * x.p


def _busy(name: str, x: Case) -> list[float]:
    """Seconds of compute, on every rank."""
    return [x.busy - pairs * (x.F + x.B - x.FB) / x.v for pairs in _fused_pairs(name, x)]


def mean_busy(name: str, x: Case) -> float:
    """Seconds of compute, on average over the ranks."""
    return sum(_busy(name, x)) / x.p


_FULL = "m >= 2p"


def _full(x: Case) -> bool:
    return x.m >= 2 * x.p


PEAKS: dict[str, Formula] = {
    "gpipe": Formula(lambda x: x.m, "any m", lambda x: True, "GPipe, arXiv 1811.06965, section 2.3"),
    "1f1b": Formula(lambda x: min(x.p, x.m), "any m", lambda x: True, _MEGATRON),
    "interleaved_1f1b": Formula(
        lambda x: min(x.m * x.v, 2 * (x.p - 1) + (x.v - 1) * _first_group(x) + 1), "any m", lambda x: True, _MEGATRON
    ),
    "looped_bfs": Formula(lambda x: x.m * x.v, "any m", lambda x: True, "breadth-first, arXiv 2211.05953"),
    "zb_h1": Formula(lambda x: min(x.p, x.m), "any m", lambda x: True, _ZERO),
    "zb_h2": Formula(lambda x: min(2 * x.p - 1, x.m), "any m", lambda x: True, _ZERO),
    "interleaved_zb": Formula(lambda x: x.p * x.v, "m a multiple of p", lambda x: x.m % x.p == 0, _ZERO),
    "zbv": Formula(lambda x: 2 * x.p, _FULL, _full, _ZBV),
    "v_half": Formula(lambda x: 2 * _half(x.p), f"p >= 2, {_FULL}", lambda x: x.p >= 2 and _full(x), _MEMORY),
    "v_min": Formula(lambda x: 2 * _third(x.p), f"p >= 2, {_FULL}", lambda x: x.p >= 2 and _full(x), _MEMORY),
    "1f1b_v": Formula(lambda x: 2 * (2 * x.p // 3 + 1), f"p >= 2, {_FULL}", lambda x: x.p >= 2 and _full(x), _MEMORY),
    "1f1b_overlap": Formula(lambda x: 2 * x.p, _FULL, _full, _OVERLAP),
    "interleaved_overlap": Formula(
        lambda x: x.p * (x.v + 1), f"m a multiple of p, {_FULL}", lambda x: x.m % x.p == 0 and _full(x), _OVERLAP
    ),
    "dualpipe": Formula(
        lambda x: x.p + 1, f"p and m even, {_FULL}", lambda x: x.p % 2 == x.m % 2 == 0 and _full(x), _DUALPIPE
    ),
    "dualpipev": Formula(lambda x: 2 * x.p + 1, _FULL, _full, _DUALPIPE),
    "chimera": Formula(
        lambda x: x.p, "p even, m = p", lambda x: x.p % 2 == 0 and x.m == x.p, "Chimera, arXiv 2107.06925, table 2"
    ),
    "hanayo": Formula(
        lambda x: x.p * x.v,
        "m = p, v twice the number of waves",
        lambda x: x.m == x.p and x.v % 2 == 0,
        "Hanayo, arXiv 2308.15762",
    ),
}
