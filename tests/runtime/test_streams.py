"""Streams and events of a step, on a device that keeps account of them: tests/runtime/devices/fake_device.cpp.

It stands in for a GPU as far as order is concerned: which stream waits for which, who may use memory again, and whether
the host waits. What a GPU does besides is not checked.
"""

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import fastpipe
from fastpipe.runtime.executor.ranks import executor_class
from tests import scripts
from tests.conftest import skip_without_native
from tests.native.build import kept_folder
from tests.patience import PATIENCE
from tests.runtime.devices.steps import CASES, NUM_STEPS, NUM_WEIGHTS, RECORDED, REPLICAS, SECONDS_PER_OPERATION

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]
STEPS = ROOT / "tests/runtime/devices/steps.py"
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
    [source, root + "/csrc/core/host_memory.cpp"],
    ["-O1", "-DAT_PER_OPERATOR_HEADERS"],  # a few seconds more than -O0, and half of the steps' time
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


TIED = """
import sys, torch
import torch.distributed as dist
from pathlib import Path
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import fastpipe
from tests.runtime.devices import fake, steps
account = fake.load(Path(sys.argv[1]))
steps.meet(account)
stages = [nn.Sequential(steps.Block(8), steps.Block(8)).to("fake") for _ in range(2)]
stages[1][0].up = stages[0][0].up
own, replicas = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()], dist.new_group()
wrapped = [DistributedDataParallel(stage, process_group=replicas) for stage in stages]
pipe = fastpipe.Pipeline(wrapped, "dualpipev", 4, steps.loss_fn, num_ranks=1, group=own)
x = torch.randn(16, 8).to("fake")
for _ in range(3):
    account.reset()
    for parameter in pipe.parameters():
        parameter.grad = None
    pipe.step(x, target=x)
print(dist.get_rank(), account.races())
"""

SHARED = """
import sys, torch
from pathlib import Path
from torch import nn
import fastpipe
from fastpipe.runtime.stage.boundary import TreespecCache
from fastpipe.runtime.transport.transport import Loopback
from tests.runtime.devices import fake, steps
account = fake.load(Path(sys.argv[1]))
x = torch.randn(16, 8).to("fake")
def races():
    found = account.races()
    account.reset()
    return found

layers = [steps.Block(8).to("fake") for _ in range(4)]
weight = layers[0].up.weight
def loss_fn(output, target):
    return steps.loss_fn(output, target) + nn.functional.linear(output, weight).square().mean()
pipe = fastpipe.Pipeline(layers, "zbv", 4, loss_fn, num_ranks=1, fused_weight_grad=True)
for _ in range(2):  # there is a gradient to add to in the second one
    pipe.step(x, target=x)
print("gradients", races())

class Passing(steps.Block):
    def forward(self, x, first=None):
        y = super().forward(x if first is None else x + first)  # sent with gaps in memory
        return torch.stack([y, y], -1)[..., 0], x * 2 if first is None else first
for schedule, num_ranks, num_stages in ("1f1b", 3, 3), ("interleaved_1f1b", 2, 4):
    layers = [Passing(8).to("fake") for _ in range(num_stages)]
    pipe = fastpipe.Pipeline(layers, schedule, 8, num_ranks=num_ranks, transport=Loopback(delay=1e-3))
    for _ in range(6):
        pipe.eval_step(x)
print("messages", races())

streams, caches = [torch.Stream(device="fake") for _ in range(2)], [TreespecCache(i, x.device) for i in range(2)]
for stream, cache in zip(streams, caches):
    with stream:
        cache.begin(0, True)
        cache.make(0, b"tree\\n[]") + 1
for microbatch in range(1, 300):
    with streams[0]:
        caches[0].make(microbatch, b"%d\\n[]" % microbatch)
print("treespecs", races())
"""


@pytest.fixture(scope="module")
def library() -> Path:
    """The fake device, compiled in another process, since to load it here would give torch a device for good."""
    folder = kept_folder(torch.__version__, sys.version, of=("tests/runtime/devices", "tests/native", "csrc/core"))
    made, source = folder / "fake_device.so", ROOT / "tests/runtime/devices/fake_device.cpp"
    if not made.exists():
        # torch locks the folder in which it builds, and one that was interrupted stays locked
        with tempfile.TemporaryDirectory(dir=folder) as own:
            subprocess.run([sys.executable, "-c", BUILD, str(source), own, str(ROOT)], check=True, timeout=PATIENCE)
            Path(own, made.name).rename(made)
    return made


def run_text(text: str, library: Path, folder: Path) -> list[str]:
    script = folder / "script.py"
    script.write_text(text)
    return scripts.run(script, str(library)).splitlines()


def run_steps(library: Path, cases: Iterable[str], processes: int = 0) -> list[tuple[str, dict[str, Any]]]:
    """What every rank says of every case, with words for both."""
    out = scripts.run(STEPS, str(library), *cases, processes=processes)
    found = [json.loads(line) for line in out.splitlines()]
    assert sorted((it["case"], it["rank"]) for it in found) == sorted(product(cases, range(max(processes, 1))))
    return [(f"{account['case']}, rank {account['rank']}", account) for account in found]


def test_the_account_finds_races(library: Path, tmp_path: Path) -> None:
    assert run_text(RACES, library, tmp_path) == [
        "['aten::add'] is read before it is written",
        "[] after a wait",
        "['aten::mul'] is written while it is read",
        "[] after a wait",
        "['memory'] is given out while it is read",
    ]


def test_the_account_finds_what_cannot_be_recorded(library: Path, tmp_path: Path) -> None:
    assert [
        line.replace("stream 1", "side").replace("stream 2", "other") for line in run_text(FAULTS, library, tmp_path)
    ] == [
        "side, recorded, waits for what was before",
        "work on stream 0, which is not recorded",
        "the host waits for an event of a recording: copy to the host",
        "other is not joined to the recording's own",
        "a wait for an event of a recording that is over",
    ]


def test_steps_wait_for_what_they_need_and_the_host_for_nothing(library: Path) -> None:
    """Every schedule's use of memory comes after its writer, no memory is used again too early, the host never waits,
    and the bits are those of the unsplit model on that device."""
    skip_without_native()
    found = {account["case"]: account for _, account in run_steps(library, CASES)}
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
        assert (account["deferred"] > 0) == account["splits"], (
            case
        )  # of one rank's two stages one has its backward split
    assert found["one stage per rank"]["streams"] == 1 + 3, "ranks that are threads do not share the caller's"
    assert found["pairs in order"]["streams"] == 1
    assert found["pairs in order"]["events"] == 0, "one stream needs no order"
    assert found["split backward"]["deferred"] == NUM_WEIGHTS
    assert found["pairs"]["streams"] == 1 + 4, "the caller's, and one per stage, whichever the program"
    assert found["contexts"]["streams"] == 1 + 4, "contexts work on the streams of their actions"
    assert "together (each stage has its own stream" in found["pairs"]["pairs"]


def test_the_python_executor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"executor = 'python': .*executor='native', or device"):
        executor_class("python", torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match="device = 'cuda': .*device='cpu'"):
        fastpipe.Pipeline([torch.nn.Linear(2, 2)], "gpipe", 2, num_ranks=1, device="cuda")


NIGHTLY = pytest.mark.nightly


@pytest.mark.parametrize(
    "transport", ["process_group", "process_group_coalesced", pytest.param("cuda_ipc", marks=NIGHTLY)]
)
def test_messages_between_processes_are_waited_for_by_streams(
    library: Path, transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process groups of a device, and its copy engine: what is sent stays until it is sent, what is received into
    is free, and who consumes it waits for it; gradients are averaged when they are complete. In a step the hosts
    wait for nothing: a thread tells the losses when they are there, and how each stage's replicas fared is read when
    the step's work is queued."""
    skip_without_native()
    cases = ["one stage each of two", "pairs", "split backward", "several stages per rank", "trees", "two routes"]
    cases += REPLICAS if transport == "process_group" else []  # there each rank is a pipeline of its own
    monkeypatch.setenv("FASTPIPE_TRANSPORT", transport)
    for where, account in run_steps(library, cases, processes=2):
        replicas = account["case"] in REPLICAS
        assert replicas or account["transport"].startswith(f"{transport}, "), where
        if transport == "process_group_coalesced" and account["case"] != "trees":  # of a tree each tensor counts
            assert account["operations"] == account["proved"], where
            assert max(account["proved"]) > 1, where
        assert account["same"], where
        assert account["races"] == [], where
        if replicas:
            assert account["waits"] == dict.fromkeys(STATUS, 2 * NUM_STEPS), where
        else:
            assert account["waits"].get("synchronizeEvent", 0) <= NUM_STEPS, where
            # and for the inputs and targets that the first two steps compare between ranks
            assert set(account["waits"]) <= {"synchronizeEvent", "copy to the host"}, where
            assert account["waits"].get("copy to the host", 0) <= 4, where


def test_gradients_of_a_tied_weight_are_averaged_when_they_are_there(library: Path, tmp_path: Path) -> None:
    """A later stage's alias of it adds on the stage's stream; parameters that the reducer knows, on that on which they
    were wrapped. A bucket has both."""
    skip_without_native()
    script = tmp_path / "script.py"
    script.write_text(TIED)
    assert sorted(scripts.run(script, str(library), processes=2).splitlines()) == ["0 []", "1 []"]


def test_what_stages_share_is_ordered(library: Path, tmp_path: Path) -> None:
    """The gradient of a weight that the loss uses, too, and to which W adds products; the memory of a tensor that a
    rank passes on or holds, which is another stream's; the copy of one with gaps; and equal treespecs."""
    skip_without_native()
    assert run_text(SHARED, library, tmp_path) == ["gradients []", "messages []", "treespecs []"]


@pytest.mark.parametrize("transport", ["process_group", pytest.param("process_group_coalesced", marks=NIGHTLY)])
def test_recorded_steps_are_replayed(library: Path, transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is in a recording that CUDA would not let into a graph, and replays have the bits of the unsplit model's
    steps, on other inputs and with other parameters each; a model that makes the host wait runs as ever, and the reason
    is told."""
    skip_without_native()
    monkeypatch.setenv("FASTPIPE_TRANSPORT", transport)
    alone = [case for case, (_, num_ranks, *_) in RECORDED.items() if num_ranks == 1]
    # one rank sends nothing, so that once is enough
    found = run_steps(library, alone) if transport == "process_group" else []
    found += run_steps(library, [case for case in RECORDED if case not in alone], processes=2)
    for where, account in found:
        assert account["same"], where
        assert account["different"] == [], where
        if account["case"].startswith("a host that waits"):
            assert account["text"].startswith("cuda graph  no: recording a step failed: RuntimeError: the host waits")
        else:
            assert account["faults"] == [], where
            assert account["text"].endswith("so far 1 recorded and 4 replayed"), where
