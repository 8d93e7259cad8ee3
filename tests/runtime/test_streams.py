"""Streams and events of a step, on a device that keeps account of them: tests/runtime/devices/fake_device.cpp.

It stands in for a GPU as far as order is concerned: which stream waits for which, who may use memory again, and whether
the host waits. What a GPU does besides is not checked.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe.runtime import native
from tests.conftest import skip_without_native
from tests.promptly import PATIENCE
from tests.runtime.devices.steps import CASES, NUM_STEPS, NUM_WEIGHTS, RECORDED, REPLICAS, SECONDS_PER_OPERATION

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
CLOCKS = 1e-4
"""How far off the device's clock may be on the host's, in seconds."""
FORWARD = 8 * SECONDS_PER_OPERATION - CLOCKS
"""The operations of two blocks are the least that a stage has."""
STATUS = ("copy from the host", "copy to the host")
"""Of the message that says how the replicas of a stage fared."""

BUILD = """
import sys
from torch.utils import cpp_extension
source, folder, root = sys.argv[1:]
cpp_extension.load(
    "fake_device",
    [source, root + "/csrc/core/shared_memory_segment.cpp"],
    ["-O0", "-DAT_PER_OPERATOR_HEADERS"],
    extra_include_paths=[root + "/csrc", root + "/tests/native"],
    build_directory=folder,
)
"""

RACES = """
import sys, torch
from pathlib import Path
from tests.runtime.devices import fake
account = fake.load(Path(sys.argv[1]))
x, side = torch.ones(8).to("fake"), torch.Stream(device="fake")
account.reset()
def races():
    found = account.races()
    account.reset()
    return [race.split(" on stream")[0] for race in found]
with side:
    y = x * 2
z = y + 1
print(races(), "is read before it is written")
torch.accelerator.current_stream().wait_stream(side)
z = y + 1
print(races(), "after a wait")
with side:
    y.mul_(2)
print(races(), "is written while it is read")
side.wait_stream(torch.accelerator.current_stream())
with side:
    y.mul_(2)
print(races(), "after a wait")
torch.accelerator.current_stream().wait_stream(side)
z = y + 1
del y
with side:
    w = x * 3
print([race.partition(" of")[0] for race in races()], "is given out while it is read")
"""

FAULTS = """
import sys, torch
from pathlib import Path
from tests.runtime.devices import fake
account = fake.load(Path(sys.argv[1]))
x, side, other = torch.ones(8).to("fake"), torch.Stream(device="fake"), torch.Stream(device="fake")
early = other.record_event()
tape = account.Recording()
with side:
    tape.begin()
    side.wait_event(early)
    other.wait_event(side.record_event())
    y = x * 2
z = x * 2
with other:
    y = (x * 2).cpu()
    side.wait_event(late := other.record_event())
    y = x * 2
tape.end()
other.wait_event(late)
print(*dict.fromkeys(account.faults()), sep="\\n")
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The fake device, compiled in another process, since to load it here would give torch a device for good."""
    folder = tmp_path_factory.mktemp("fake_device")
    run("-c", BUILD, str(ROOT / "tests/runtime/devices/fake_device.cpp"), str(folder), str(ROOT))
    return folder / "fake_device.so"


def start(*arguments: str, **variables: str) -> subprocess.Popen[str]:
    environment = os.environ | variables
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True
    )


def lines_of(process: subprocess.Popen[str]) -> list[str]:
    out, errors = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, errors[-3000:]
    return out.splitlines()


def run(*arguments: str) -> list[str]:
    return lines_of(start(*arguments))


def test_the_account_finds_races(library: Path) -> None:
    assert run("-c", RACES, str(library)) == [
        "['aten::add'] is read before it is written",
        "[] after a wait",
        "['aten::mul'] is written while it is read",
        "[] after a wait",
        "['memory'] is given out while it is read",
    ]


def test_the_account_finds_what_cannot_be_recorded(library: Path) -> None:
    assert [
        line.replace("stream 1", "side").replace("stream 2", "other") for line in run("-c", FAULTS, str(library))
    ] == [
        "side, recorded, waits for what was before",
        "work on stream 0, which is not recorded",
        "the host waits for an event of a recording: copy to the host",
        "other is not joined to the recording's own",
        "a wait for an event of a recording that is over",
    ]


@pytest.mark.parametrize("name", ["native", "python"])
def test_steps_wait_for_what_they_need_and_the_host_for_nothing(library: Path, name: str) -> None:
    """Every schedule's use of memory comes after its writer, no memory is used again too early, the host never waits,
    and the bits are those of the unsplit model on that device."""
    if name == "native":
        skip_without_native()
    lines = run("-m", "tests.runtime.devices.steps", str(library), name)
    found: dict[str, dict[str, Any]] = dict(zip(CASES, map(json.loads, lines), strict=True))
    for case, account in found.items():
        assert account["same"], case
        assert account["races"] == [], case
        assert account["waits"] == {}, case
        assert account["waits to read the loss"] == 1, case
        times = account["times"]
        told = [action is not None and action[3] in "BI" for action in account["told"]]
        assert all(told), case
        assert bool(told) == ("contexts" in case), case
        assert times["early"] < CLOCKS, f"{case}: an action seems to start before what it waits for has ended"
        assert times["forward"] > FORWARD, f"{case}: the times are those at which the host launched"
        defers = account["splits"] and native.load() is not None
        assert (account["deferred"] > 0) == defers, case  # of one rank's two stages one has its backward split
    if name == "python":
        return
    assert found["one stage a rank"]["streams"] == 1 + 3, "ranks that are threads do not share the caller's"
    assert found["pairs in order"]["streams"] == 1
    assert found["pairs in order"]["events"] == 0, "one stream needs no order"
    assert found["split backward"]["deferred"] == NUM_WEIGHTS
    assert found["pairs"]["streams"] == 1 + 4, "the caller's, and one a stage"
    assert found["contexts"]["streams"] == 1 + 4, "contexts work on the streams of their actions"
    assert "together (each stage has its own stream" in found["pairs"]["pairs"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device = 'cuda': torch .* sees no such device here; pass device='cpu'"):
        fastpipe.Pipeline([torch.nn.Linear(2, 2)], "gpipe", 2, num_ranks=1, device="cuda")


def run_ranks(library: Path, name: str, cases: list[str], transport: str, folder: Path) -> list[list[str]]:
    """What two ranks print."""
    arguments = ("-m", "tests.runtime.devices.steps", str(library), name, *cases)
    meeting = {"FILE": str(folder / "meeting"), "WORLD_SIZE": "2", "FASTPIPE_TRANSPORT": transport}
    ranks = [start(*arguments, RANK=str(rank), **meeting) for rank in range(2)]
    try:
        return [lines_of(process) for process in ranks]
    finally:
        for process in ranks:
            process.kill()


TRANSPORTS = [("process_group", "native"), ("process_group", "python"), ("cuda_ipc", "native"), ("cuda_ipc", "python")]


@pytest.mark.parametrize(("transport", "name"), TRANSPORTS)
def test_messages_between_processes_are_waited_for_by_streams(
    library: Path, transport: str, name: str, tmp_path: Path
) -> None:
    """The process groups of a device, and its copy engine: what is sent stays until it is sent, what is received into
    is free, and who consumes it waits for it; gradients are averaged when they are complete. The hosts wait for
    nothing: a thread tells the losses when they are there, and how each stage's replicas fared is read when the step's
    work is queued."""
    if name == "native" or transport == "cuda_ipc":
        skip_without_native()
    cases = ["one stage each of two", "pairs", "split backward", "several stages a rank", "trees", "two routes"]
    cases += REPLICAS if transport == "process_group" else []  # there each rank is a pipeline of its own
    for rank, lines in enumerate(run_ranks(library, name, cases, transport, tmp_path)):
        found: dict[str, dict[str, Any]] = dict(zip(cases, map(json.loads, lines), strict=True))
        for case, account in found.items():
            where = f"{case}, rank {rank}"
            assert case in REPLICAS or account["transport"].startswith(transport), where
            assert account["same"], where
            assert account["races"] == [], where
            if case in REPLICAS:
                assert account["waits"] == dict.fromkeys(STATUS, 2 * NUM_STEPS), where
            else:
                assert account["waits"].get("synchronizeEvent", 0) <= NUM_STEPS, where
                assert set(account["waits"]) <= {"synchronizeEvent"}, where


def check_recorded(found: dict[str, Any], where: str) -> None:
    assert found["same"], where
    assert found["different"] == [], where
    assert found["faults"] == [], where
    assert found["text"].endswith("so far 1 recorded and 4 replayed"), where


@pytest.mark.parametrize("name", ["native", "python"])
def test_recorded_steps_are_replayed(library: Path, name: str, tmp_path: Path) -> None:
    """Nothing is in a recording that CUDA would not let into a graph, and replays have the bits of the unsplit model's
    steps, on other inputs and with other parameters each; a model that makes the host wait runs as ever, and the reason
    is told."""
    if name == "native":
        skip_without_native()
    alone = [case for case, (_, num_ranks, *_) in RECORDED.items() if num_ranks == 1]
    lines = run("-m", "tests.runtime.devices.steps", str(library), name, *alone)
    found: dict[str, dict[str, Any]] = dict(zip(alone, map(json.loads, lines), strict=True))
    waiting = found.pop("a host that waits")
    assert waiting["same"] and waiting["different"] == []
    assert waiting["text"].startswith("cuda graph  no: recording a step failed: RuntimeError: the host waits")
    for case, account in found.items():
        check_recorded(account, case)
    cases = [case for case in RECORDED if case not in alone]
    for rank, lines in enumerate(run_ranks(library, name, cases, "process_group", tmp_path)):
        for case, account in zip(cases, map(json.loads, lines), strict=True):
            check_recorded(account, f"{case}, rank {rank}")
