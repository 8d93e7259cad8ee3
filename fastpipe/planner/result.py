"""Plan: what `fastpipe.plan` gives, and how it prints."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fastpipe.checks import check_index
from fastpipe.planner.problem import UNITS, Memory, human
from fastpipe.schedule import Schedule
from fastpipe.timeline import Timeline

_ROWS = 16
"""Candidates that print shows."""


class Candidate(NamedTuple):
    """One schedule that was considered.

    Attributes:
        name: the registry's name, with options; or ``"plan ..."`` for an order of the planner, with its origin.
        num_microbatches: the number of microbatches of a step.
        stages_per_rank: the number of stages per rank.
        makespan: seconds.
        span: seconds.
        bubble_fraction: 1 - busy / (ranks x objective).
        peak_memory: the maximum over ranks, in activations of a rank's share of the model; 1F1B's is the number of
            ranks.
        peak_bytes: the maximum over ranks, with parameters and receive buffers; 0 if the costs have no bytes.
        messages: transfers between ranks in a step.
        fits: whether it is within the memory limit.
        chosen: whether it is the plan.
        refused: why it is not possible; the numbers are then NaN or 0.
        copies: copies of the model that all ranks hold together: 2 if two ranks hold each stage.
    """

    name: str
    num_microbatches: int
    stages_per_rank: int = 0
    makespan: float = float("nan")
    span: float = float("nan")
    bubble_fraction: float = float("nan")
    peak_memory: float = float("nan")
    peak_bytes: float = 0.0
    messages: int = 0
    fits: bool = False
    chosen: bool = False
    refused: str | None = None
    copies: int = 1


@dataclass(frozen=True, eq=False)
class Plan:
    """The best schedule that was found for costs and memory, with a lower bound.

    Attributes:
        schedule: for `fastpipe.Pipeline`, validated.
        partition: the layers of every stage; None if the costs are not those of layers.
        timeline: the schedule simulated under the costs.
        objective: ``"makespan"`` or ``"span"``.
        memory: the limit; None for none.
        bound: seconds; no order of these stages on this placement within the memory has a shorter objective.
        bound_anywhere: the same for any placement of these stages.
        candidates: all schedules that were considered, the best that fits first.
        cut: whether `time_limit` ended the search early; otherwise the same seed gives the same plan.
        recomputes: whether each stage recomputes its forward; None if `recompute` was "none".
        optimal: whether the exact solver has proved that no order is shorter; see `fastpipe.plan`.
        counts_bytes: whether the costs have bytes of activations; otherwise memory is counted in activations.
        counts_parameters: whether the costs have bytes of parameters, so that a second copy of the model counts.
        annealed: whether orders were improved by annealing, which needs the planning library and an effort above 0.
    """

    schedule: Schedule
    partition: list[range] | None
    timeline: Timeline
    objective: str
    memory: Memory | None
    bound: float
    bound_anywhere: float
    candidates: list[Candidate] = field(repr=False)
    cut: bool = False
    optimal: bool = False
    recomputes: tuple[bool, ...] | None = None
    counts_bytes: bool = False
    counts_parameters: bool = False
    annealed: bool = False

    def recompute(self, stage: int, module: Any = None) -> str:
        """The policy of a stage, for ``Pipeline(recompute=plan.recompute)``."""
        stage = check_index("stage", stage, self.schedule.num_stages)
        return "full" if self.recomputes is not None and self.recomputes[stage] else "none"

    @property
    def makespan(self) -> float:
        """Seconds from the first start to the last end."""
        return self.timeline.makespan

    @property
    def span(self) -> float:
        """Seconds of the rank that takes longest from its own first start to its own last end."""
        return self.timeline.span

    @property
    def value(self) -> float:
        """The objective."""
        return self.span if self.objective == "span" else self.makespan

    @property
    def bubble_fraction(self) -> float:
        """1 - busy / (ranks x objective)."""
        return self.timeline.span_bubble_fraction if self.objective == "span" else self.timeline.bubble_fraction

    @property
    def gap(self) -> float:
        """1 - bound / value: an upper limit of what another order of these stages could gain."""
        return max(0.0, 1.0 - self.bound / self.value) if self.value > 0 else 0.0

    @property
    def chosen(self) -> Candidate:
        """The plan among the candidates."""
        return next(one for one in self.candidates if one.chosen)

    def plot(self, path: str | Path, **options: Any) -> Path:
        """Draw bubble against memory of all candidates; see `fastpipe.visualize.pareto`.

        The plan is ringed, the best of every family is named, and the limit is a line. Memory is in bytes if the limit
        is, or if candidates differ in the number of microbatches. Candidates that need more than twice the limit are
        omitted.
        """
        from fastpipe.visualize import pareto

        counts = {one.num_microbatches for one in self.candidates if one.refused is None}
        title = f"{self.schedule.num_ranks} ranks, {self.schedule.num_microbatches} microbatches"
        title += f" (of {min(counts)} to {max(counts)})" if len(counts) > 1 else ""
        by_bytes = self.counts_bytes and (len(counts) > 1 or (self.memory is not None and self.memory.unit == "bytes"))
        best = best_of_families(self.candidates)
        rest = [one for one in self.candidates if one not in best.values()]
        rows = [one._replace(name=name) for name, one in best.items()]
        chosen = next(row.name for row in rows if row.chosen)
        shown = self._in_bytes(rows, rest) if by_bytes else {"rows": rows, "others": rest, "limit": self._line()}
        shown |= {"title": f"{title}: bubble by {self.objective}", "chosen": chosen}
        return pareto(path=path, **{**_near(shown), **options})

    def _line(self) -> float | None:
        """The limit in activations of a rank's share."""
        if self.memory is None or self.memory.unit == "bytes":
            return None
        return self.memory.of_activations(self.schedule.num_ranks, self.schedule.num_ranks)

    def _in_bytes(self, rows: list[Candidate], rest: list[Candidate]) -> dict[str, Any]:
        """What is drawn with bytes for activations, in the largest unit that leaves the plan's at least 1."""
        unit = next((unit for unit in ("TiB", "GiB", "MiB", "KiB") if self.chosen.peak_bytes >= UNITS[unit]), "B")
        size = UNITS[unit]
        scaled = [[one._replace(peak_memory=one.peak_bytes / size) for one in group] for group in (rows, rest)]
        limit = self.memory.amount / size if self.memory is not None and self.memory.unit == "bytes" else None
        label = f"peak memory of a rank ({unit}, with parameters and receive buffers)"
        return {"rows": scaled[0], "others": scaled[1], "limit": limit, "memory_label": label}

    def __str__(self) -> str:
        schedule, chosen = self.schedule, self.chosen
        limit = "no memory limit" if self.memory is None else f"memory {self.memory}"
        lines = [
            f"Plan for {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches, {limit}: {chosen.name}",
            f"  {self.objective} {self.value:.6g}, bubble {percent(self.bubble_fraction)}; "
            f"lower bound {self.bound:.6g} on this placement ({percent(self.gap)} less), "
            f"{self.bound_anywhere:.6g} on any" + ("; proved optimal" if self.optimal else ""),
            f"  stages per rank: {chosen.stages_per_rank} ({schedule.placement.name}), {chosen.messages} messages, "
            f"peak activations {chosen.peak_memory:.4g} (1F1B: {schedule.num_ranks})"
            + (f", {human(chosen.peak_bytes)}" if chosen.peak_bytes else ""),
        ]
        lines += self._not_counted()
        if self.partition is not None:
            lines.append("  layers: " + " ".join(f"{part.start}-{part[-1]}" for part in self.partition))
        if self.recomputes is not None:
            again = [str(stage) for stage, does in enumerate(self.recomputes) if does]
            lines.append(f"  stages that recompute: {', '.join(again) or 'none'}")
        if self.cut:
            lines.append("  the time limit ended the search early")
        if not self.annealed:
            lines.append("  not annealed: the best of the named schedules and of list scheduling")
        return "\n".join([*lines, "", *self._table()])

    def _not_counted(self) -> list[str]:
        """What the memory of this plan leaves out."""
        lines = []
        if self.memory is not None and not self.counts_bytes:
            lines.append(
                "  memory is counted in activations, as the costs have no bytes (stage_bytes, or held_bytes of layers)"
            )
        if self.chosen.copies > 1:
            lines.append(
                "  the ranks hold two copies of the model"
                + ("" if self.counts_parameters else ", which is not counted (costs of layers have parameter_bytes)")
            )
        return lines

    def _table(self) -> list[str]:
        header = ("candidate", "stages", "microbatches", "makespan", "span", "bubble", "memory", "messages", "")
        shown = [one for one in self.candidates if one.refused is None][:_ROWS]
        rows = [header, *(_row(one) for one in shown)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = []
        for row in rows:
            cells = [row[0].ljust(widths[0]), *(c.rjust(w) for c, w in zip(row[1:-1], widths[1:-1], strict=True))]
            lines.append("  ".join([*cells, row[-1]]).rstrip())
        possible = sum(one.refused is None for one in self.candidates)
        if possible > len(shown):
            lines.append(f"and {possible - len(shown)} more: plan.candidates, or --json")
        return lines


def _near(shown: dict[str, Any]) -> dict[str, Any]:
    """What is drawn, but for what needs more than twice the limit."""
    limit = shown["limit"]
    if limit is None:
        return shown
    return {
        **shown,
        **{name: [row for row in shown[name] if row.peak_memory <= 2 * limit] for name in ("rows", "others")},
    }


def family_of(name: str) -> str:
    """A candidate's name without its options."""
    return re.split(r"[(, ]", name)[0]


def best_of_families(candidates: Sequence[Candidate]) -> dict[str, Candidate]:
    """What is drawn of them with a name: of each family the plan, else the one with the least bubble that fits."""
    best: dict[str, Candidate] = {}
    for one in sorted(candidates, key=lambda one: (not one.chosen, not one.fits, one.bubble_fraction)):
        if one.refused is None:
            family = family_of(one.name)
            best.setdefault("the plan" if one.chosen or family == "plan" else family, one)
    return best


def _row(one: Candidate) -> tuple[str, ...]:
    notes = ["the plan"] if one.chosen else [] if one.fits else ["too much memory"]
    notes += ["two copies of the model"] if one.copies > 1 else []
    return (
        one.name,
        str(one.stages_per_rank),
        str(one.num_microbatches),
        f"{one.makespan:.6g}",
        f"{one.span:.6g}",
        percent(one.bubble_fraction),
        f"{one.peak_memory:.4g}",
        str(one.messages),
        ", ".join(notes),
    )


def percent(value: float) -> str:
    """A fraction for people."""
    return f"{100 * max(0.0, value):.2f}%"
