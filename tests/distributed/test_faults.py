"""Faults of every kind, in every schedule, executor and transport: each is named, waited for or refused; none hangs.

python -m tests.distributed.test_faults [SECONDS]    writes the table in docs/reliability.md, of the cases that begin in
                                                     this time, or of all
"""

import contextlib
import itertools
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fastpipe import Pipeline, save_checkpoint
from fastpipe.testing.faults import FAULTS, Fault, NastyError, full_disk
from tests.conftest import WAYS, skip_without_native
from tests.distributed.page import write_block
from tests.distributed.ranks import ranks
from tests.patience import PATIENCE

COUNT = 8
STOPPED_TIMEOUT = 15.0


CALLS = ["wrong argument", "skipped step", "full disk"]
"""Faults of the script, not of a layer."""
EXPECTED = {
    "raise": "named, and the next step works",
    "nasty exception": "named, and the next step works",
    "SystemExit": "named, and the next step works",
    "exit": "named, and the pipeline is closed",
    "kill": "named, and the pipeline is closed",
    "stop": "named after the timeout, and the pipeline is closed",
    "delay": "waited for, with bit-identical results",
    "NaN": "named by clip_grad_norm_",
    "out of memory": "named, and the next step works",
    "few descriptors": "needs none, with bit-identical results",
    "wrong argument": "refused on all ranks, and the next step works",
    "skipped step": "refused on all ranks, and the next step works",
    "full disk": "a checkpoint fails on all ranks, and the next step works",
}


class Case(NamedTuple):
    """A fault, and where it happens."""

    fault: str
    phase: str
    schedule: str
    executor: str
    transport: str
    size: int

    @property
    def victim(self) -> int:
        """The rank."""
        return self.size // 2


def all_cases() -> list[Case]:
    places = [*itertools.product(FAULTS, ("forward", "backward")), *itertools.product(CALLS, ("call",))]
    ways = [(*way, size) for way in WAYS for size in (2, 4)]
    schedules = ("1f1b", "zbv", "dualpipev")
    return [Case(*place, schedule, *way) for schedule in schedules for way in ways for place in places]


class Seen(NamedTuple):
    """What one rank saw: the losses of three steps, and the first exception with its rank and text."""

    losses: list[float]
    kind: str
    rank: int | None
    text: str
    again: str


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(COUNT, 4, generator=generator), torch.randn(COUNT, 4, generator=generator)


def train(case: Case) -> Seen:
    """Runs on every rank: three steps, with the fault in the second one."""
    torch.manual_seed(0)
    own, in_layer = dist.get_rank(), case.fault in FAULTS
    is_victim = own == case.victim
    error = FAULTS[case.fault]() if in_layer else ValueError
    at_call = COUNT + 1 if is_victim and in_layer else -1
    layers = [Fault(nn.Linear(4, 4), -1, ValueError) for _ in range(2 * case.size)]
    layers[case.victim] = Fault(layers[case.victim].module, at_call, error, backward=case.phase == "backward")
    timeout = STOPPED_TIMEOUT if case.fault == "stop" else PATIENCE
    # two layers per stage in a schedule with one stage per rank
    if case.schedule == "1f1b":
        layers = layers[: case.size]
    options = {"executor": case.executor, "transport": case.transport, "timeout": timeout}
    pipe = Pipeline(layers, case.schedule, COUNT, nn.functional.mse_loss, **options)
    seen = Seen([], "", None, "", "")
    for step in range(3):
        if case.fault == "skipped step" and step == 1 and is_victim:
            continue
        x, target = batch(step)
        if case.fault == "wrong argument" and step == 1 and is_victim:
            x, target = x[:3], target[:3]
        pipe_zero_grad(pipe)
        try:
            seen.losses.append(float(pipe.step(x, target=target).loss))
            if case.fault == "full disk" and step == 1:
                save(pipe, is_victim)
            pipe.clip_grad_norm_(1.0, error_if_nonfinite=True)
        except BaseException as error:
            rank, kind = getattr(error, "rank", None), type(error).__name__
            text = "" if isinstance(error, NastyError) else str(error)
            if seen.kind:
                return seen._replace(again=text)
            seen = seen._replace(kind=kind, rank=rank, text=text)
    return seen


def save(pipe: Pipeline, disk_is_full: bool) -> None:
    """Write a checkpoint, which fails where the disk is full."""
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    try:
        with full_disk() if disk_is_full else contextlib.nullcontext():
            save_checkpoint(Path(folder[0]) / "step1", pipe, torch.optim.SGD(pipe.parameters()))
    finally:
        shutil.rmtree(folder[0], ignore_errors=True)


def pipe_zero_grad(pipe: Pipeline) -> None:
    for parameter in pipe.parameters():
        parameter.grad = None


def classify(case: Case, seen: dict[int, Seen], undisturbed: list[float]) -> str:
    """What the ranks that lived saw, in the words of `EXPECTED`; else what went wrong."""
    others = [one for rank, one in seen.items() if rank != case.victim]
    survivors = list(seen.values())
    if all(one.losses == undisturbed and not one.kind for one in survivors):
        return EXPECTED[case.fault if case.fault == "few descriptors" else "delay"]
    if case.fault == "full disk" and all(
        one.losses == undisturbed and "File too large" in one.text for one in survivors
    ):
        return EXPECTED["full disk"]
    if all("gradient" in one.text and one.losses[0] == undisturbed[0] for one in survivors) and case.fault == "NaN":
        return EXPECTED["NaN"]
    if case.fault in CALLS and all(one.kind in ("ValueError", "StepError") for one in survivors):
        goes_on = all(not one.again and len(one.losses) > 1 for one in survivors) or case.fault == "skipped step"
        return EXPECTED[case.fault] if goes_on else f"refused, then: {survivors}"
    if all(one.kind == "StepError" and one.rank == case.victim for one in others):
        if all("build a new one" in one.text and "build a new one" in one.again for one in others):
            return EXPECTED["stop" if case.fault == "stop" else "kill"]
        if all([one.losses[0], one.losses[-1]] == [undisturbed[0], undisturbed[2]] for one in survivors):
            return EXPECTED["raise"]
    return f"otherwise: {seen}"


def outcome(case: Case, undisturbed: list[float]) -> str:
    """Run a case in processes of its own."""
    with ranks(case.size) as group:
        group.start(train, case)
        alive = [rank for rank in range(case.size) if rank != case.victim or case.fault not in ("exit", "kill", "stop")]
        answers = group.results(alive)
    return classify(case, dict(zip(alive, answers, strict=True)), undisturbed)


def losses_of(case: Case) -> list[float]:
    """The losses without a fault: those of ranks that are threads."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 4) for _ in range(2 * case.size)]
    layers = layers[: case.size] if case.schedule == "1f1b" else layers
    pipe = Pipeline(layers, case.schedule, COUNT, nn.functional.mse_loss, num_ranks=case.size, executor="python")
    return [float(pipe.step(x, target=target).loss) for x, target in map(batch, range(3))]


@pytest.mark.nightly
@pytest.mark.parametrize("case", all_cases(), ids=lambda case: "-".join(map(str, case)))
def test_a_fault_is_named_waited_for_or_refused(case: Case) -> None:
    if case.executor == "native":
        skip_without_native()
    assert outcome(case, losses_of(case)) == EXPECTED[case.fault]


def write_table(seconds: float) -> int:
    """Run cases in a random order and write what came of them; how many had another outcome than is expected."""
    found: dict[str, Counter[str]] = {}
    cases, until = all_cases(), time.monotonic() + seconds
    random.Random(0).shuffle(cases)
    for case in itertools.takewhile(lambda _: time.monotonic() < until, cases):
        result = outcome(case, losses_of(case))
        print(*case, result, sep="  ", flush=True)
        # what is not expected is printed whole, and only counted on the page
        found.setdefault(case.fault, Counter())[result.partition(":")[0]] += 1
    rows = [f"| {fault} | {count} | {result} |" for fault in sorted(found) for result, count in found[fault].items()]
    text = (
        f"{sum(map(Counter.total, found.values()))} of the {len(cases)} cases of `tests/distributed/test_faults.py` "
        "(1F1B, ZBV and DualPipeV; 2 and 4 ranks;\nexecutors and transports; forward and backward), in a random order. "
        "The nightly tests run all of them:\n\n"
        "| fault | cases | outcome |\n|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    write_block("faults", text)
    return sum(result != EXPECTED[fault] for fault in found for result in found[fault].elements())


if __name__ == "__main__":
    from tests.distributed import test_faults  # ranks find its functions by this name

    sys.exit(test_faults.write_table(float(sys.argv[1]) if len(sys.argv) > 1 else float("inf")))
