"""Memory: what the user allows, as a fraction of 1F1B's, as activations, or as bytes of a rank."""

from __future__ import annotations

import re
from dataclasses import dataclass
from numbers import Real
from typing import Any

from fastpipe.cost import LARGEST

UNITS = {
    **{unit + "B": 1000.0**power for power, unit in enumerate(("", "K", "M", "G", "T"))},
    **{unit + "iB": 1024.0**power for power, unit in enumerate(("K", "M", "G", "T"), 1)},
}
_MOST_FRACTION, _LEAST_BYTES = 1000.0, 1e6
_TEXT = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z]*)\s*")
_HELP = "give a fraction of 1F1B's (0.625), activations ('5 activations'), or bytes of a rank ('40GiB')"


@dataclass(frozen=True)
class Memory:
    """What a rank may hold.

    Attributes:
        unit: ``"fraction"`` of 1F1B's memory, ``"activations"`` of a rank's share of the model and one microbatch (1F1B
            holds as many as there are ranks), or ``"bytes"``, parameters and receive buffers included.
        amount: how much.
    """

    unit: str
    amount: float

    def of_activations(self, held_by_model: float, num_ranks: int) -> float:
        """The limit in the unit of what stages hold, given what the whole model holds of one microbatch."""
        if self.unit == "bytes":
            return self.amount
        share = self.amount if self.unit == "fraction" else self.amount / num_ranks
        return share * held_by_model

    def __str__(self) -> str:
        if self.unit == "fraction":
            return f"{self.amount:.4g} of 1F1B's"
        return f"{self.amount:.4g} activations a rank" if self.unit == "activations" else f"{human(self.amount)} a rank"


def is_number(value: Any) -> bool:
    """Whether it is one, of Python or numpy; a bool is none."""
    return isinstance(value, Real) and not isinstance(value, bool)


def memory_of(value: Any) -> Memory | None:
    """What `fastpipe.plan` takes for memory.

    Raises:
        ValueError: for what is none of the three.
    """
    if value is None or isinstance(value, Memory):
        return value
    if isinstance(value, str):
        return _read(value)
    amount = value if isinstance(value, int) else float(value) if is_number(value) else 0.0  # an int may be too large
    if isinstance(value, bool) or not 0 < amount <= LARGEST:
        raise ValueError(f"memory = {value!r}: {_HELP}")
    amount = float(amount)
    if amount <= _MOST_FRACTION:
        return Memory("fraction", amount)
    if amount >= _LEAST_BYTES:
        return Memory("bytes", amount)
    raise ValueError(f"memory = {value!r} is too much for a fraction and too little for bytes: {_HELP}")


def _read(text: str) -> Memory:
    match = _TEXT.fullmatch(text)
    number, unit = (float(match[1]), match[2]) if match else (0.0, "")
    if not 0 < number <= LARGEST:
        raise ValueError(f"memory = {text!r}: {_HELP}")
    if not unit:
        return memory_of(number) or Memory("fraction", number)
    if unit in ("activation", "activations"):
        return Memory("activations", number)
    factors = {name.lower(): factor for name, factor in UNITS.items()}
    if unit.lower() not in factors:
        raise ValueError(f"memory = {text!r}: there is no unit {unit!r}; use one of {', '.join(UNITS)} or activations")
    return Memory("bytes", number * factors[unit.lower()])


def human(count: float) -> str:
    """Bytes for people."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if count >= UNITS[unit]:
            return f"{count / UNITS[unit]:.4g} {unit}"
    return f"{count:.4g} B"
