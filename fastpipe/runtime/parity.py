"""Parity: what differs between a pipeline's step and the unsplit model's, measured and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from fastpipe.runtime.tensors import bytes_of

_SHOWN = 20
_INTEGERS = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
}


@dataclass(frozen=True)
class Difference:
    """One thing that is not the same.

    Attributes:
        what: ``"loss"``, ``"metric"``, ``"added loss"``, ``"norm"``, ``"gradient"`` or ``"parameter"``.
        name: which one: the parameter's name in the pipeline, the microbatch of a loss, or that of what is reported.
        stage: where the parameter is; None for what is of the whole model.
        relative: the largest difference of two elements over the largest element of the unsplit model's.
        ulps: the largest number of steps between two elements; 0 where only the signs of zeros differ.
        note: what else there is to say.
    """

    what: str
    name: str = ""
    stage: int | None = None
    relative: float = math.inf
    ulps: float = math.nan
    note: str = ""

    def row(self) -> tuple[str, ...]:
        """The columns of the table."""
        stage = "" if self.stage is None else str(self.stage)
        relative = "" if math.isnan(self.relative) else f"{self.relative:.2g}"
        ulps = "" if math.isnan(self.ulps) else f"{self.ulps:.0f}" if self.ulps < 1e6 else f"{self.ulps:.1g}"
        return self.what, self.name, stage, relative, ulps, self.note


@dataclass(frozen=True)
class Parity:
    """What `fastpipe.check_parity` found; printed, a table with the worst first.

    Attributes:
        differences: what is not equal to the last bit, the worst first.
        num_compared: how many gradients were compared.
        loss: the pipeline's, and the unsplit model's.
        norm: the norm of all gradients, the pipeline's and the unsplit model's.
        hints: what may be the reason.
    """

    differences: Sequence[Difference]
    num_compared: int
    loss: tuple[float, float]
    norm: tuple[float, float]
    hints: Sequence[str] = field(default=())

    @property
    def ok(self) -> bool:
        """Whether loss, gradients and norm are equal to the last bit."""
        return not self.differences

    def __str__(self) -> str:
        if self.ok:
            return (
                f"parity: loss {self.loss[0]:.6g}, norm {self.norm[0]:.6g} and {self.num_compared} gradients are those "
                "of the unsplit model, bit for bit"
            )
        lines = [
            f"parity: {len(self.differences)} differences from the unsplit model ({self.num_compared} gradients "
            "compared), the worst first",
            f"loss {self.loss[0]:.9g} instead of {self.loss[1]:.9g}; norm {self.norm[0]:.9g} instead of "
            f"{self.norm[1]:.9g}",
            *_table(self.differences[:_SHOWN]),
        ]
        if len(self.differences) > _SHOWN:
            lines.append(f"and {len(self.differences) - _SHOWN} more")
        return "\n".join([*lines, *self.hints])


def _table(differences: Iterable[Difference]) -> list[str]:
    rows = [("what", "name", "stage", "relative", "ulps", ""), *(difference.row() for difference in differences)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    left = (0, 1, 5)
    return [
        "  ".join(
            cell.ljust(width) if i in left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def worst_first(differences: Iterable[Difference]) -> list[Difference]:
    """Those of a parameter that two ranks hold only once, and the largest first."""
    worst: dict[tuple[str, str], Difference] = {}
    for difference in differences:
        key = difference.what, difference.name
        if key not in worst or difference.relative > worst[key].relative:
            worst[key] = difference
    return sorted(worst.values(), key=lambda found: -found.relative)


def compared(
    what: str, name: str, stage: int | None, found: torch.Tensor | None, expected: torch.Tensor | None
) -> list[Difference]:
    """One difference, or none. A gradient that is missing is one of zeros."""
    if found is None or expected is None:
        given = found if expected is None else expected
        if given is None or not given.any():
            return []
        zeros = torch.zeros_like(given)
        found, expected = (zeros, expected) if found is None else (found, zeros)
    assert expected is not None
    looks = [f"{str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for t in (found, expected)]
    if looks[0] != looks[1]:
        return [Difference(what, name, stage, note=f"{looks[0]} instead of {looks[1]}")]
    if same_bytes(found, expected):
        return []
    relative, ulps = measured(found, expected)
    note = "only the signs of zeros" if ulps == 0 else "" if math.isfinite(relative) else "not finite"
    return [Difference(what, name, stage, relative, ulps, note)]


def same_bytes(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two tensors that look alike are the same to the last bit, NaN included."""
    return torch.equal(*(bytes_of(tensor) for tensor in (found, expected)))


def measured(found: torch.Tensor, expected: torch.Tensor) -> tuple[float, float]:
    """The relative difference and the number of representable steps; infinite where only one of two is finite."""
    a, b = (_real(tensor) for tensor in (found, expected))
    differs = ~((a == b) | (a.isnan() & b.isnan()))
    if not (a[differs].isfinite() & b[differs].isfinite()).all():
        return math.inf, math.nan
    apart = (a.double() - b.double())[differs].abs()
    if not apart.numel():
        return 0.0, 0.0
    scale = float(b[b.isfinite()].double().abs().max())
    return float(apart.max()) / scale if scale else math.inf, _ulps(a[differs], b[differs])


def _real(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach().cpu().contiguous()
    return (torch.view_as_real(tensor) if tensor.is_complex() else tensor).reshape(-1)


def _ulps(a: torch.Tensor, b: torch.Tensor) -> float:
    integer = _INTEGERS.get(a.dtype)
    if integer is None:
        return math.nan
    x, y = (_ordered(tensor.view(integer).long(), torch.iinfo(integer).min) for tensor in (a, b))
    same_sign = (x < 0) == (y < 0)
    # of different signs the difference may be too large for an integer
    apart = torch.where(same_sign, (x - y).abs().double(), x.double().abs() + y.double().abs())
    return float(apart.max())


def _ordered(bits: torch.Tensor, lowest: int) -> torch.Tensor:
    """Numbers in the order of the floats that they are the bits of; neighbours differ by 1, both zeros are 0."""
    return torch.where(bits < 0, lowest - bits, bits)


def parity_of(
    differences: Iterable[Difference],
    num_compared: int,
    losses: tuple[torch.Tensor, torch.Tensor],
    norms: tuple[torch.Tensor, torch.Tensor],
    hints: Mapping[str, bool],
) -> Parity:
    """The result, with those hints that apply."""
    loss, norm = (tuple(map(float, pair)) for pair in (losses, norms))
    chosen = [hint for hint, applies in hints.items() if applies]
    return Parity(tuple(worst_first(differences)), num_compared, (loss[0], loss[1]), (norm[0], norm[1]), chosen)
