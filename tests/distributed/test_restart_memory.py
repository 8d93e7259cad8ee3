"""torchrun --max-restarts with copies in memory: no step is lost, and the bits are those of an undisturbed run."""

import re
import shutil
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.distributed.test_restart import ARGUMENTS, SCRIPT, STEPS, check, finish, launch, two_agents, weights
from tests.patience import PATIENCE
from tests.scripts import run

MEMORY = Path("/dev/shm")


def in_memory(copies: int) -> list[str]:
    """Arguments of a script whose ranks save each step in memory, and on disk only at the end."""
    return ["--save-every", "100", "--memory-copies", str(copies)]


def of(agent: subprocess.Popen[str]) -> list[Path]:
    """The folders in memory of an agent's ranks."""
    return [path.parent for path in MEMORY.glob(f"fastpipe-*/agent.{agent.pid}.*")]


def finish_and_compare(folder: Path, agents: Sequence[subprocess.Popen[str]], kills: Sequence[str], size: int) -> str:
    """What agents print whose last weights are those of an undisturbed run, and that leave nothing in memory."""
    text = finish(folder, agents, kills)
    own = folder / "undisturbed"
    run(SCRIPT, *ARGUMENTS, "--checkpoints", str(own), "--out", str(folder), processes=size)
    check(folder, weights(own / f"step{STEPS}"))
    assert [path for agent in agents for path in of(agent)] == []
    return text


@pytest.mark.timeout(4 * PATIENCE)
@pytest.mark.parametrize(
    ("processes", "kills", "resumed"),
    [
        # when the copy of a step is not complete, training goes on from the step before it; the other kill is in the
        # step after training, when the copies are gone: from disk
        (2, ["refresh3:1", "step4:0"], ["2", "4"]),
        # the first step is that of the check
        pytest.param(2, ["step4:0", "refresh2:1"], ["2", "3"], marks=pytest.mark.nightly),
        pytest.param(4, ["step3:3", "clip:2", "refresh1:0"], ["1", "1", "1"], marks=pytest.mark.nightly),
        # the last kill is in a step after training
        pytest.param(4, ["refresh3:1", "step3:0", "step3:3"], ["2", "3", "4"], marks=pytest.mark.nightly),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, list) else str(value),
)
def test_no_step_is_lost(processes: int, kills: list[str], resumed: list[str], tmp_path: Path) -> None:
    agent = ["--standalone", "--nproc-per-node", str(processes), "--max-restarts", str(len(kills))]
    agents = [launch(tmp_path, agent, kills, arguments=in_memory(1))]
    text = finish_and_compare(tmp_path, agents, kills, processes)
    assert re.findall(r"resumed +after step (\d+)", text) == resumed


@pytest.mark.nightly
@pytest.mark.timeout(4 * PATIENCE)
def test_two_hosts_keep_each_other_s_copies(tmp_path: Path) -> None:
    """Two agents, two pretended hosts; the memory of the second one is emptied when its rank is killed."""
    kills = ["step4:1"]
    agent = two_agents(kills)
    agents = [launch(tmp_path, agent, kills, arguments=in_memory(2), FASTPIPE_HOST=host) for host in "ab"]
    until = time.monotonic() + PATIENCE
    while not (tmp_path / "notes" / kills[0]).exists() and time.monotonic() < until:
        time.sleep(0.05)
    (lost,) = of(agents[1])
    shutil.rmtree(lost)
    text = finish_and_compare(tmp_path, agents, kills, 2)
    assert re.findall(r"resumed +after step (\d+)", text) == ["2"]
