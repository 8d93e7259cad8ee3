"""CostModel: seconds and bytes per stage action and per transfer."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fastpipe.checks import as_path, check_counts, check_index, check_type, is_number, is_whole, plain
from fastpipe.program import Channel, ChannelKind, Op
from fastpipe.timeline import Timeline

PerStage = float | Sequence[float]
PerLink = float | Mapping[tuple[int, int], float]
"""A number for every link, or ``{(source rank, destination rank): number}``."""

LARGEST = 1e100
"""Of a cost, so that sums and ratios of costs are finite. A bandwidth is at least 1 / LARGEST."""
_LINK_FIELDS = {"comm": 0.0, "bandwidth": math.inf}
"""What holds for a link that a mapping does not name."""


@dataclass(frozen=True)
class CostModel:
    """What an action of one *stage* and one microbatch costs. A number holds for every stage, a sequence names each.

    Attributes:
        forward: seconds of F.
        backward_input: seconds of I.
        backward_weight: seconds of W.
        comm: seconds of latency of a transfer between two ranks, for every link or by ``{(source, destination): s}``;
            hand-overs within a rank are free.
        backward: seconds of B. Default: I + W.
        overlapped: seconds of a fused F and B, by the stage of its forward. Default: the sum of the two.
        bandwidth: bytes per second of a link, in the form of ``comm``. Default: infinite.
        activation_bytes: bytes of a stage's output; its gradient has as many.
        stage_bytes: bytes that a stage holds of one microbatch from the start of F to the end of W or B.
        recompute: the fraction of its forward that a stage runs again in its backward, 0 to 1 (1 for
            ``Pipeline(recompute="full")``). I and B take this fraction of ``forward`` longer than the seconds above;
            so does a fused pair, unless ``overlapped`` is given.
        kept_bytes: bytes that a stage that recomputes holds of one microbatch between F and its backward, besides its
            input; from the start of I or B to the end of W or B it holds ``stage_bytes``. Default: the part of
            ``stage_bytes`` that is not recomputed. Measured seconds include the recompute: then give this, and not
            ``recompute``.
    """

    forward: PerStage = 1.0
    backward_input: PerStage = 1.0
    backward_weight: PerStage = 1.0
    comm: PerLink = 0.0
    backward: PerStage | None = None
    overlapped: PerStage | None = None
    bandwidth: PerLink = math.inf
    activation_bytes: PerStage = 0.0
    stage_bytes: PerStage = 0.0
    recompute: PerStage = 0.0
    kept_bytes: PerStage | None = None

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, plain(value))
                _check(field.name, getattr(self, field.name))

    def __hash__(self) -> int:
        values = (getattr(self, field.name) for field in fields(self))
        return hash(tuple(tuple(sorted(v.items())) if isinstance(v, dict) else v for v in values))

    def check(self, num_stages: int) -> None:
        """Refuse a sequence that does not name every stage."""
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, tuple) and len(value) != num_stages:
                raise ValueError(f"{field.name} has {len(value)} values for {num_stages} stages: give one per stage")

    def per_stage(self, name: str, num_stages: int) -> npt.NDArray[np.float64]:
        """The attribute ``name``, one number per stage, with defaults filled in; I and B include the recompute.

        Raises:
            ValueError: for what is no attribute with one number per stage.
        """
        names = [field.name for field in fields(self) if field.name not in _LINK_FIELDS]
        if name not in names:
            raise ValueError(f"name = {name!r}: use one of {', '.join(names)}")
        if name == "overlapped" and self.overlapped is None:
            raise ValueError("name = 'overlapped': it was not given, and F and B of two stages take the sum of theirs")
        check_counts(num_stages=num_stages)
        found = {"backward": self._backward, "backward_input": self._backward_input, "kept_bytes": self._kept_bytes}
        if name in found:
            return np.array([found[name](stage) for stage in range(num_stages)], dtype=np.float64)
        return np.array([_of(getattr(self, name), stage) for stage in range(num_stages)], dtype=np.float64)

    def compute_seconds(self, op: int, stage: int, pair_stage: int = -1) -> float:
        """Seconds of a compute action.

        Args:
            pair_stage: of an OVERLAP_F_B, the stage of its backward; ``stage`` is that of its forward.
        """
        if op == Op.F:
            return _of(self.forward, stage)
        if op == Op.I:
            return self._backward_input(stage)
        if op == Op.W:
            return _of(self.backward_weight, stage)
        if op == Op.B:
            return self._backward(stage)
        if op == Op.OVERLAP_F_B:
            if self.overlapped is not None:
                return _of(self.overlapped, stage)
            if not is_whole(pair_stage):
                raise ValueError(f"pair_stage = {pair_stage!r}: give the stage of the pair's backward")
            return _of(self.forward, stage) + self._backward(pair_stage)
        Op(op)  # refuses what is none
        return 0.0

    def _backward(self, stage: int) -> float:
        if self.backward is not None:
            return _of(self.backward, stage) + self._recomputed(stage)
        return self._backward_input(stage) + _of(self.backward_weight, stage)

    def _backward_input(self, stage: int) -> float:
        return _of(self.backward_input, stage) + self._recomputed(stage)

    def _recomputed(self, stage: int) -> float:
        return _of(self.recompute, stage) * _of(self.forward, stage)

    def _kept_bytes(self, stage: int) -> float:
        whole, part = _of(self.stage_bytes, stage), _of(self.recompute, stage)
        if self.kept_bytes is not None:
            return min(whole, _of(self.kept_bytes, stage))
        return whole * (1 - part)

    def message_bytes(self, channel: Channel, consumer_stage: int) -> float:
        """Bytes of the message that ``consumer_stage`` receives over ``channel``."""
        boundary = consumer_stage - 1 if channel.kind == ChannelKind.ACTIVATION else consumer_stage
        return _of(self.activation_bytes, boundary)

    def transfer_seconds(self, channel: Channel, consumer_stage: int) -> float:
        """Seconds of that message on its link."""
        if channel.source == channel.destination:
            return 0.0
        latency, bandwidth = self.link(channel.source, channel.destination)
        return latency + self.message_bytes(channel, consumer_stage) / bandwidth

    def link(self, source: int, destination: int) -> tuple[float, float]:
        """Latency in seconds and bandwidth in bytes per second of the link between two ranks, in that direction."""
        found = []
        for name, otherwise in _LINK_FIELDS.items():
            value = getattr(self, name)
            found.append(value.get((source, destination), otherwise) if isinstance(value, dict) else value)
        return float(found[0]), float(found[1])

    def to_json(self, path: str | Path | None = None) -> str:
        """Write it as JSON, into a file if a path is given; links as ``"0->1"``, an infinite bandwidth left out.

        Returns:
            The text.
        """
        data: dict[str, Any] = {}
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, dict):
                data[field.name] = {f"{a}->{b}": v for (a, b), v in value.items() if not math.isinf(v)}
            elif value is not None and value != math.inf:
                data[field.name] = list(value) if isinstance(value, tuple) else value
        text = json.dumps(data, indent=2) + "\n"
        if path is not None:
            as_path(path).write_text(text, encoding="utf-8")
        return text

    @classmethod
    def from_json(cls, path: str | Path) -> CostModel:
        """Read it from a file, or from the text itself when it has a line break. What is left out keeps its default.

        Raises:
            ValueError: naming the file and the entry that is wrong.
        """
        with json_of(path) as data:
            return cls.from_dict(data)

    @classmethod
    def from_dict(cls, data: Any) -> CostModel:
        """Build it from a mapping of its attributes; links as pairs, or as ``"0->1"`` like in JSON.

        Raises:
            ValueError: naming the entry that is wrong.
        """
        if not isinstance(data, Mapping):
            raise ValueError("give an object with some of the attributes of CostModel")
        known = [field.name for field in fields(cls)]
        for name in data:
            if name not in known:
                raise ValueError(f"there is no {name!r}; there are {', '.join(known)}")
        found = {name: _links(name, plain(value)) for name, value in data.items()}
        for name, value in found.items():
            _refuse_null(name, value)
        return cls(**found)

    @classmethod
    def from_timeline(cls, timeline: Timeline) -> CostModel:
        """Medians per stage and kind of a measured (or simulated) timeline.

        A kind that did not run gets its cost from those that did: B is I + W, I and W are halves of B. The latency is
        the median over the transfers whose receiver was waiting; other sends last until their receiver is posted.
        Fused pairs have their own cost, as they take less than their parts.
        """
        check_type(Timeline, timeline=timeline)
        seconds = timeline.median_seconds()
        stages = range(timeline.program.num_stages)
        forward, inputs, weights, both, fused = (
            [seconds.get((op, s), math.nan) for s in stages] for op in (Op.F, Op.I, Op.W, Op.B, Op.OVERLAP_F_B)
        )
        inputs = [b / 2 if math.isnan(i) else i for i, b in zip(inputs, both, strict=True)]
        weights = [b / 2 if math.isnan(w) else w for w, b in zip(weights, both, strict=True)]
        both = [i + w if math.isnan(b) else b for i, w, b in zip(inputs, weights, both, strict=True)]
        return cls(
            forward=_filled(forward),
            backward_input=_filled(inputs),
            backward_weight=_filled(weights),
            backward=_filled(both),
            overlapped=None if all(map(math.isnan, fused)) else _filled(fused),
            comm=timeline.median_latency(),
        )


@contextlib.contextmanager
def found_in(path: str | Path) -> Iterator[None]:
    """What is wrong with costs is said with the file that they are from."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{path}: {str(error).removeprefix('costs: ')}") from None


@contextlib.contextmanager
def json_of(path: str | Path) -> Iterator[Any]:
    """What a JSON file has in it, or the text itself when it has a line break; errors within name the file.

    Raises:
        ValueError: for a text that is no JSON.
    """
    text = str(path)
    is_text = "\n" in text
    with found_in("costs" if is_text else path):
        text = text if is_text else as_path(path).read_text(encoding="utf-8-sig")
        try:
            data = json.loads(text, object_pairs_hook=_without_doubles)
        except (json.JSONDecodeError, RecursionError) as error:
            raise ValueError(f"no JSON: {error}") from None
        yield data


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, of whose equal names json would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        doubled = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{doubled!r} is there twice: give it once")
    return found


def shared_out(cost: CostModel, parts: float) -> CostModel:
    """The costs of one stage, where a rank's share is cut into so many."""
    names = ("forward", "backward_input", "backward_weight", "backward", "overlapped", "stage_bytes", "kept_bytes")
    values = {name: getattr(cost, name) for name in names}
    return replace(cost, **{name: value / parts for name, value in values.items() if value is not None})


def _of(value: Any, stage: int) -> float:
    return float(value[check_index("stage", stage, len(value))] if isinstance(value, tuple) else value)


def _check(name: str, value: Any) -> None:
    if isinstance(value, dict):
        _check_links(name, value)
        numbers: Sequence[Any] = list(value.values())
    elif isinstance(value, tuple):
        if name in _LINK_FIELDS:
            raise ValueError(f"{name}: give a number, or one for each link as {{(source, destination): number}}")
        if not value:
            raise ValueError(f"{name} is empty: give a number, or a sequence with one for each stage")
        numbers = value
    else:
        numbers = [value]
    for number in numbers:
        if name == "bandwidth" and number == math.inf:
            continue
        if not is_cost(number):
            raise ValueError(f"{name} = {number!r}: give numbers from 0 to {LARGEST:g}, larger ones in a larger unit")
        if name == "recompute" and number > 1:
            raise ValueError(f"recompute = {number!r}: give the part of a forward that is run again, from 0 to 1")
        if name == "bandwidth" and number < 1 / LARGEST:
            raise ValueError(f"bandwidth = {number!r}: give bytes per second, or leave it out for an infinite one")


def _check_links(name: str, value: Mapping[Any, Any]) -> None:
    if name not in _LINK_FIELDS:
        raise ValueError(f"{name}: give a number, or a sequence with one for each stage")
    for link in value:
        if not (isinstance(link, tuple) and len(link) == 2 and all(map(is_whole, link))):
            raise ValueError(f"{name}: {link!r} is no link; name it (source rank, destination rank)")


def is_cost(number: Any) -> bool:
    """Whether it is a number of Python's from 0 to `LARGEST`."""
    return is_number(number, most=LARGEST)


def check_links(costs: Any, num_ranks: int) -> None:
    """Refuse a link to a rank that there is not, in costs of either kind: it would count for nothing."""
    for name in _LINK_FIELDS:
        links = getattr(costs, name)
        for link in links if isinstance(links, dict) else ():
            if max(link) >= num_ranks:
                named = f"{name} names the link {link[0]}->{link[1]}"
                raise ValueError(f"{named}, and num_ranks = {num_ranks}: there are 0 to {num_ranks - 1}")


def _refuse_null(name: str, value: Any) -> None:
    values = value.values() if isinstance(value, dict) else value if isinstance(value, tuple) else [value]
    if None in values:
        raise ValueError(f"{name} is or has a null: give numbers, or leave {name} out")


def _links(name: str, value: Any) -> Any:
    """JSON's form of links, ``{"0->1": seconds}``, as pairs."""
    if not isinstance(value, dict):
        return value
    found = {}
    for key, number in value.items():
        if not isinstance(key, str):
            found[key] = number
            continue
        source, arrow, destination = key.partition("->")
        if not (arrow and source.isdecimal() and destination.isdecimal()):
            raise ValueError(f"{name}: {key!r} is no link; write 0->1")
        link = int(source), int(destination)
        if link in found:
            raise ValueError(f"{name}: the link {key!r} is there twice: give it once")
        found[link] = number
    return found


def _filled(values: list[float]) -> tuple[float, ...]:
    """Stages that were not seen cost the mean of those that were."""
    known = [value for value in values if not math.isnan(value)]
    mean = float(np.mean(known)) if known else 0.0
    return tuple(mean if math.isnan(value) else value for value in values)
