"""What audits cost: ``python benchmarks/audit.py``.

First the seconds of a step with and without ``Pipeline(audit=0.05)``, in turns, where layers sleep instead of
computing, so that ranks do not contend for cores. It shows which part of what is computed again does not fit where
auditors wait.

Then the processor's time of each rank with the model of `examples/train_gpt.py` over four ranks, whole steps with
clipping and AdamW: for computing again, and for the rest. The rest is the draw, the sums of weights, and what is
packed, sent and received. It leaves out the copies and sums of the audited microbatches within the step.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt_model import Shape, gpt_layers, loss_fn
from ranks import ranks
from sleeping import WIDTH, SleepingStage
from tables import machine, parser, spread, table
from text_data import byte_frequencies, random_batches, read_corpus

import fastpipe

CONTEXT = 128
SCHEDULES = ("1f1b", "gpipe", "interleaved_1f1b", "zbv")


class Training:
    """A pipeline and its steps.

    Attributes:
        seconds: of the processor, for computing again, and for the rest.
    """

    def __init__(self, options: Any, audit: float | None) -> None:
        text = read_corpus().training
        torch.manual_seed(0)
        model = gpt_layers(Shape(options.layers, options.width, CONTEXT), byte_frequencies(text))
        self.pipe = fastpipe.Pipeline(model, options.schedule, options.microbatches, loss_fn=loss_fn, audit=audit)
        self.optimizer = torch.optim.AdamW(self.pipe.parameters(), lr=1e-3, fused=True)
        self.batches = random_batches(text, options.rows * options.microbatches, CONTEXT, seed=1)
        self.steps, self.seconds, self.nested = options.steps, {"again": 0.0, "rest": 0.0}, 0.0
        self.audit: Any = self.pipe._steps.audit
        if self.audit is not None:
            for name in ("begin", "report", "end"):
                self._watch("rest", self.audit, name)
            self._watch("rest", self.audit._weights, "note")
            self._watch("again", self.audit, "_complete")
            self._watch("again", self.audit, "_start")

    def _watch(self, what: str, owner: Any, name: str) -> None:
        """Time a method, without the others that it calls."""
        method = getattr(owner, name)

        def timed(*args: Any) -> Any:
            outer, self.nested = self.nested, 0.0
            start = time.thread_time()
            try:
                return method(*args)
            finally:
                took = time.thread_time() - start
                self.seconds[what] += took - self.nested
                self.nested = outer + took

        setattr(owner, name, timed)

    def run(self) -> dict[str, float]:
        """The processor's seconds of some steps and of their audits, and how much was computed again."""
        self.seconds = dict.fromkeys(self.seconds, 0.0)
        start, before = time.process_time(), 0 if self.audit is None else self.audit.num_computed
        for _ in range(self.steps):
            inputs, targets = next(self.batches)
            self.optimizer.zero_grad()
            self.pipe.step(inputs, target=targets)
            self.pipe.clip_grad_norm_(1.0)
            self.optimizer.step()
        count = 0 if self.audit is None else self.audit.num_computed - before
        return {"steps": time.process_time() - start, "count": count, **self.seconds}


def make_tasks(options: Any, _: int) -> dict[str, Callable[[], Any]]:
    return {name: Training(options, audit).run for name, audit in (("without", None), ("audit", options.audit))}


def measure(options: Any) -> list[list[str]]:
    """Rows of the table, one for each rank and one for all."""
    with ranks(options.ranks, partial(make_tasks, options), pin=options.pin) as group:
        rounds = [(group.call("without"), group.call("audit")) for _ in range(options.rounds)]
    rows = []
    for name, chosen in [*((f"rank {r}", [r]) for r in range(options.ranks)), ("all", list(range(options.ranks)))]:
        plain = [sum(without[r]["steps"] for r in chosen) for without, _ in rounds]
        again, rest, counts = (
            [sum(audit[r][what] for r in chosen) for _, audit in rounds] for what in ("again", "rest", "count")
        )
        shares = [[100 * a / p for a, p in zip(part, plain, strict=True)] for part in (again, rest)]
        rows.append([name, spread(plain, 1e3 / options.steps), *map(spread, shares), str(int(sum(counts)))])
    return rows


class SleepingSteps:
    """Steps of a pipeline of stages that sleep as long in their F, I and W."""

    def __init__(self, schedule: str, options: Any, audit: float | None) -> None:
        shape = {"num_ranks": torch.distributed.get_world_size(), "num_microbatches": options.microbatches}
        stages = fastpipe.make_schedule(schedule, **shape).placement.num_stages
        layers = [SleepingStage(lambda _: time.sleep(1e-3 * options.sleep)) for _ in range(stages)]
        mse = torch.nn.functional.mse_loss
        self.pipe = fastpipe.Pipeline(layers, schedule, options.microbatches, loss_fn=mse, audit=audit)
        self.x, self.steps = torch.randn(options.microbatches, WIDTH), options.steps

    def run(self) -> float:
        """Seconds of a step."""
        start = time.perf_counter()
        for _ in range(self.steps):
            self.pipe.step(self.x, target=self.x)
        return (time.perf_counter() - start) / self.steps


def make_sleeping(schedule: str, options: Any, _: int) -> dict[str, Callable[[], Any]]:
    given = (("without", None), ("audit", options.audit))
    return {name: SleepingSteps(schedule, options, audit).run for name, audit in given}


def measure_steps(options: Any) -> list[list[str]]:
    """Rows of the first table, one for each schedule and number of ranks."""
    rows = []
    for schedule, count in [(name, options.ranks) for name in SCHEDULES] + [("1f1b", 2)]:
        with ranks(count, partial(make_sleeping, schedule, options), pin="never") as group:
            group.call("audit")
            rounds = [(max(group.call("without")), max(group.call("audit"))) for _ in range(options.rounds)]
        plain, audited = zip(*rounds, strict=True)
        more = [100 * (b / a - 1) for a, b in rounds]
        rows.append([f"{schedule}, {count} ranks", spread(plain, 1e3), spread(audited, 1e3), spread(more)])
    return rows


def main() -> None:
    options = parser(__doc__, rounds=10)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=160)
    options.add_argument("--rows", type=int, default=1, help="of a microbatch (1)")
    options.add_argument("--microbatches", type=int, default=8)
    options.add_argument("--schedule", default="1f1b")
    options.add_argument("--audit", type=float, default=0.05)
    options.add_argument("--steps", type=int, default=10, help="of a measurement (10)")
    options.add_argument("--sleep", type=float, default=4.0, help="milliseconds of a sleeping forward (4)")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    print(machine())
    print(f"audit = {chosen.audit}, {chosen.rounds} rounds of {chosen.steps} steps\n")
    heads = ["", "without, ms a step", "audited, ms a step", "more, %"]
    print(table(heads, measure_steps(chosen), markdown=chosen.markdown), end="\n\n")
    print(f"{chosen.schedule}, {chosen.ranks} ranks, {chosen.layers} layers of width {chosen.width}\n")
    heads = ["", "processor, ms a step", "computing again, %", "the rest, %", "microbatches"]
    print(table(heads, measure(chosen), markdown=chosen.markdown))


if __name__ == "__main__":
    main()
