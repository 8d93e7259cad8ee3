"""torchrun --max-restarts: killed at any moment, training goes on and ends with the weights of an undisturbed run."""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.patience import PATIENCE
from tests.scripts import run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
KILLED = ROOT / "tests" / "distributed" / "killed.py"
STEPS = 4
SMALL = ["--device", "cpu", "--width", "32", "--context", "32", "--layers", "4", "--sample", "1"]
CUT_TIMEOUT = 30.0
ARGUMENTS = [*SMALL, "--microbatches", "4", "--schedule", "1f1b", "--steps", str(STEPS), "--save-every", "1"]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint but the random states of the processes: weights and the optimizer's state."""
    reader = dcp.FileSystemReader(folder)
    saved = reader.read_metadata().state_dict_metadata
    wanted = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in saved.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    dcp.load(wanted, storage_reader=reader, no_dist=True)
    return wanted


def launch(
    folder: Path, agent: Sequence[str], kills: Sequence[str], within: Sequence[str] = (), **environment: str
) -> subprocess.Popen[str]:
    """Start an agent of torchrun, which writes checkpoints and notes into a folder; ``within`` begins the command."""
    script = [str(SCRIPT), *ARGUMENTS, "--checkpoints", str(folder / "saved"), "--out", str(folder)]
    (folder / "notes").mkdir(exist_ok=True)
    own = {"OMP_NUM_THREADS": "1", "KILLS": ",".join(kills), "NOTES": str(folder / "notes"), **environment}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [*within, sys.executable, "-m", "torch.distributed.run", *agent, str(KILLED), *script]
    # its output is read at the end: pipes of two agents could fill
    with (folder / f"log{len(list(folder.glob('log*')))}").open("w") as log:
        return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, text=True)


def finish(folder: Path, agents: Sequence[subprocess.Popen[str]], kills: Sequence[str]) -> str:
    """Wait for agents that must succeed after the kills; what they printed."""
    try:
        codes = [agent.wait(2 * PATIENCE) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
    text = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log*")))
    assert codes == [0] * len(agents), text[-6000:]
    assert sorted(path.name for path in (folder / "notes").iterdir()) == sorted(kills), text[-6000:]
    return text


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, torch.Tensor]]:
    """The last checkpoint of a run that nobody disturbs, by number of processes."""

    @functools.cache
    def train(processes: int) -> dict[str, torch.Tensor]:
        folder = tmp_path_factory.mktemp("undisturbed")
        run(SCRIPT, *ARGUMENTS, "--checkpoints", str(folder), "--out", str(folder), processes=processes)
        return weights(folder / f"step{STEPS}")

    return train


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """The same bits."""
    found = weights(folder / "saved" / f"step{STEPS}")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize(
    ("processes", "kills"),
    [
        # the first step is that of the check; two more have been saved when the second rank is killed
        (2, ["construction:1", "step4:0", "save:1"]),
        pytest.param(2, ["step1:1", "evaluation9:0", "clip:1", "close:0"], marks=pytest.mark.nightly),
        pytest.param(4, ["construction:0", "step1:3", "step4:2", "save:0"], marks=pytest.mark.nightly),
        pytest.param(4, ["evaluation1:1", "clip:2", "save:3", "close:1"], marks=pytest.mark.nightly),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_killed_ranks_are_restarted(
    processes: int, kills: list[str], undisturbed: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    agent = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(len(kills))]
    text = finish(tmp_path, [launch(tmp_path, agent, kills)], kills)
    assert ("resumed" in text) == any(kill[:4] in ("step", "save", "clos") for kill in kills[1:])
    check(tmp_path, undisturbed(processes))


def agents(folder: Path, kills: Sequence[str], endpoint: str) -> list[subprocess.Popen[str]]:
    """Two agents on this machine, whose processes take each other to be on another host."""
    common = ["--nnodes", "2", "--nproc-per-node", "1", "--max-restarts", str(len(kills)), "--rdzv-id", "two"]
    agent = [*common, "--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint]
    return [launch(folder, agent, kills, FASTPIPE_HOST=host) for host in "ab"]


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENCE)
def test_two_agents_restart_together(undisturbed: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path) -> None:
    """Each counts its own restarts: both kills are of the agent that did not see the other one."""
    kills = ["step1:1", "step4:0"]
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    finish(tmp_path, agents(tmp_path, kills, f"127.0.0.1:{port}"), kills)
    check(tmp_path, undisturbed(2))


def ip(*arguments: str) -> str:
    """Run ``ip``; what it prints.

    Raises:
        subprocess.CalledProcessError, FileNotFoundError: if it fails.
    """
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


@contextlib.contextmanager
def two_namespaces() -> Iterator[list[str]]:
    """Two network namespaces with a cable between them, 10.213.77.1 and .2; skips where they cannot be made."""
    names = [f"fastpipe-{os.getpid()}-{end}" for end in "ab"]
    links = [f"fp{os.getpid()}{end}" for end in "ab"]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", links[0], "type", "veth", "peer", "name", links[1])
        for number, (name, link) in enumerate(zip(names, links, strict=True), 1):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "link", "set", link, "name", "cable")
            ip("-n", name, "address", "add", f"10.213.77.{number}/24", "dev", "cable")
            for device in ("lo", "cable"):
                ip("-n", name, "link", "set", device, "up")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces cannot be made here: {getattr(error, 'stderr', '') or error}")
    else:
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)


def agent_in(
    folder: Path, names: Sequence[str], number: int, processes: int, kills: Sequence[str]
) -> subprocess.Popen[str]:
    """An agent in a namespace, with so many processes."""
    agent = ["--nnodes", "2", "--nproc-per-node", str(processes), "--max-restarts", "3", "--rdzv-id", "cut"]
    agent += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "10.213.77.1:29413"]
    agent += ["--local-addr", f"10.213.77.{number + 1}", "--rdzv-conf", f"is_host={1 - number}"]
    within = ["ip", "netns", "exec", names[number]]
    options = {"FASTPIPE_HOST": "ab"[number], "GLOO_SOCKET_IFNAME": "cable", "TIMEOUT": str(CUT_TIMEOUT)}
    return launch(folder, agent, kills, within, **options)


def processes_in(name: str) -> set[int]:
    """The processes in a namespace."""
    return set(map(int, ip("netns", "pids", name).split()))


def wait_until(condition: Callable[[], bool], seconds: float, folder: Path) -> float:
    """Wait for something that must come to be; the seconds it took."""
    start = time.monotonic()
    while not condition():
        text = "".join(path.read_text(errors="replace")[-6000:] for path in folder.glob("log*"))
        assert time.monotonic() < start + seconds, text
        time.sleep(0.05)
    return time.monotonic() - start


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize("processes", [1, 2])
def test_a_host_that_is_cut_off_comes_back(
    processes: int, undisturbed: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """The link is down in the midst of a step and of a save in the background: ranks on both sides end by themselves,
    and the agents start them again when it is up."""
    kills = ["cut4:0"]
    with two_namespaces() as names:
        both = [agent_in(tmp_path, names, number, processes, kills) for number in range(2)]
        try:
            wait_until((tmp_path / "notes" / kills[0]).exists, PATIENCE, tmp_path)
            ranks = [processes_in(name) - {agent.pid} for name, agent in zip(names, both, strict=True)]
            assert all(ranks)
            ip("-n", names[1], "link", "set", "cable", "down")
            for name, within in zip(names, ranks, strict=True):
                wait_until(lambda name=name, within=within: not within & processes_in(name), 2 * CUT_TIMEOUT, tmp_path)
            ip("-n", names[1], "link", "set", "cable", "up")
            text = finish(tmp_path, both, kills)
        finally:
            for agent in both:
                agent.terminate()
    assert "its host does not answer" in text
    assert "resumed" in text
    check(tmp_path, undisturbed(2 * processes))
