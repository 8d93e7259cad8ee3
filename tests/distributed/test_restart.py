"""torchrun --max-restarts: killed at any moment, training goes on and ends with the weights of an undisturbed run.

python -m tests.distributed.test_restart     writes the table in docs/reliability.md
"""

import contextlib
import functools
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.distributed.page import write_block
from tests.patience import PATIENCE
from tests.scripts import run

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "examples" / "train_gpt.py"
LLAMA = [str(ROOT / "examples" / "train_llama.py"), "--device", "cpu"]
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
    folder: Path,
    agent: Sequence[str],
    kills: Sequence[str],
    *,
    within: Sequence[str] = (),
    script: Sequence[str] = (),
    arguments: Sequence[str] = (),
    **environment: str,
) -> subprocess.Popen[str]:
    """Start an agent of torchrun, which writes checkpoints and notes into a folder; ``within`` begins the command."""
    script = script or [str(SCRIPT), *ARGUMENTS, "--out", str(folder)]
    script = [*script, *arguments, "--checkpoints", str(folder / "saved")]
    (folder / "notes").mkdir(exist_ok=True)
    own = {"OMP_NUM_THREADS": "1", "KILLS": ",".join(kills), "NOTES": str(folder / "notes"), **environment}
    own["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [*within, sys.executable, "-m", "torch.distributed.run", *agent, str(KILLED), *script]
    # its output is read at the end: pipes of two agents could fill
    with (folder / f"log{len(list(folder.glob('log*')))}").open("w") as log:
        return subprocess.Popen(command, env=os.environ | own, stdout=log, stderr=log, text=True)


def two_agents(kills: Sequence[str], *, nodes: int = 2, processes: int = 1) -> list[str]:
    """Arguments of agents that meet at a free port, and may start their processes so often that all kills happen."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    numbers = {"nnodes": nodes, "nproc-per-node": processes, "max-restarts": 2 * len(kills), "rdzv-id": "restart"}
    numbers |= {"rdzv-backend": "c10d", "rdzv-endpoint": f"127.0.0.1:{port}"}
    return [text for name, value in numbers.items() for text in (f"--{name}", str(value))]


def finish(folder: Path, agents: Sequence[subprocess.Popen[str]], kills: Sequence[str]) -> str:
    """Wait for agents that must succeed after the kills; what they printed."""
    try:
        codes = [agent.wait(4 * PATIENCE) for agent in agents]
    finally:
        for agent in agents:
            agent.terminate()
    text = "".join(path.read_text(errors="replace") for path in sorted(folder.glob("log*")))
    assert codes == [0] * len(agents), text[-6000:]
    assert sorted(path.name for path in (folder / "notes").iterdir()) == sorted(kills), text[-6000:]
    return text


def train(folder: Path, processes: int) -> dict[str, torch.Tensor]:
    """The last checkpoint of a run that nobody disturbs."""
    run(SCRIPT, *ARGUMENTS, "--checkpoints", str(folder), "--out", str(folder), processes=processes)
    return weights(folder / f"step{STEPS}")


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], dict[str, torch.Tensor]]:
    """The same, by number of processes."""
    return functools.cache(lambda processes: train(tmp_path_factory.mktemp("undisturbed"), processes))


def check(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    """The same bits."""
    found = weights(folder / "saved" / f"step{STEPS}")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


class Layout(NamedTuple):
    """Agents on this machine, with so many processes each, which take those of another agent to be on another host."""

    agents: int
    processes: int

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.agents * self.processes

    def kills(self, moments: Sequence[str]) -> list[str]:
        """One at each moment, of one rank after another, the last one first.

        With two agents none at close: torchrun's rendezvous is closed by the first agent whose ranks have ended, and
        then the other one cannot start its ranks again.
        """
        chosen = [moment for moment in moments if moment != "close" or self.agents == 1]
        return [f"{moment}:{-1 - number % self.size + self.size}" for number, moment in enumerate(chosen)]

    def start(self, folder: Path, kills: Sequence[str]) -> list[subprocess.Popen[str]]:
        """Start the agents. Each counts its own restarts: one more if it sees a rank of the other one end."""
        agent = two_agents(kills, nodes=self.agents, processes=self.processes)
        return [launch(folder, agent, kills, FASTPIPE_HOST=host) for host in "ab"[: self.agents]]


# the first step is that of the check; two more have been saved when a rank is killed in the fourth
MOMENTS = ["construction", "step1", "evaluation1", "step4", "clip", "save", "evaluation9", "close"]
LAYOUTS = [Layout(1, 2), Layout(1, 4), Layout(2, 1), Layout(2, 2)]


@pytest.mark.nightly
@pytest.mark.timeout(6 * PATIENCE)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))
def test_killed_ranks_are_restarted(
    layout: Layout, undisturbed: Callable[[int], dict[str, torch.Tensor]], tmp_path: Path
) -> None:
    """test_restart_memory.py has two kills for every day, one of which is resumed from disk."""
    kills = layout.kills(MOMENTS)
    text = finish(tmp_path, layout.start(tmp_path, kills), kills)
    assert "resumed" in text
    check(tmp_path, undisturbed(layout.size))


@pytest.mark.nightly
@pytest.mark.timeout(6 * PATIENCE)
def test_a_llama_is_restarted(tmp_path: Path) -> None:
    """Killed in a step, in clipping and in a save, it goes on from step 5, and ends as if nothing had happened."""
    pytest.importorskip("transformers")
    script, kills = [*LLAMA, "--steps", "10"], ["step8:1", "clip:0", "save:1"]
    run(script[0], *script[1:], "--checkpoints", str(tmp_path / "whole"), processes=2)
    agent = ["--standalone", "--nproc-per-node", "2", "--max-restarts", "3"]
    assert "resumed from" in finish(tmp_path, [launch(tmp_path, agent, kills, script=script)], kills)
    found, expected = weights(tmp_path / "saved" / "step10"), weights(tmp_path / "whole" / "step10")
    assert found.keys() == expected.keys()
    assert [name for name, value in found.items() if not torch.equal(value, expected[name])] == []


def try_layout(layout: Layout, expected: dict[str, torch.Tensor]) -> str:
    """Run a layout with all kills; its row of the table."""
    kills = layout.kills(MOMENTS)
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        agents, bits = layout.start(folder, kills), "yes"
        try:
            finish(folder, agents, kills)
            check(folder, expected)
        except (AssertionError, subprocess.TimeoutExpired, OSError) as error:
            print(layout, error, file=sys.stderr)
            bits = "**no**"
        steps = [float(line) for line in (folder / "notes.steps").read_text().split()]
        tried = [float((folder / "notes" / kill).read_text()) for kill in kills if (folder / "notes" / kill).exists()]
    waits = [min(step - time for step in steps if step > time) for time in tried if steps and steps[-1] > time]
    hosts = "shared memory" if layout.agents == 1 else "Gloo" if layout.processes == 1 else "shared memory and Gloo"
    times = f"{statistics.median(waits):.0f} s, {max(waits):.0f} s" if waits else "-"
    return f"| {layout.agents} | {layout.size} | {hosts} | {len(tried)} | {len(waits)} | {bits} | {times} |"


def write_table() -> None:
    """Kill at all moments in all layouts, and write docs/reliability.md."""
    rows = []
    for layout in LAYOUTS:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(try_layout(layout, train(Path(folder), layout.size)))
        print(rows[-1], flush=True)
    text = (
        f"One rank after another was killed at {len(MOMENTS)} moments of one run with {STEPS} steps, "
        f"{os.cpu_count()} cores: {', '.join(MOMENTS)} (with one agent)\n"
        "(the number counts the calls; step1 is the first one, step4 a later one, evaluation1 before training, "
        "evaluation9 after it).\nThe seconds are those from the kill to the end of the next step of training, start "
        "of the interpreters included.\n\n"
        "| agents | ranks | messages | kills tried | resumed | bit-equal | seconds: median, longest |\n"
        "|---|---|---|---|---|---|---|\n" + "\n".join(rows) + "\n"
    )
    write_block("kills", text)


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
    return launch(folder, agent, kills, within=within, **options)


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


if __name__ == "__main__":
    write_table()
