"""Steps of several processes that share one GPU, over NCCL and by its copy engines.

To start processes takes longer than most cases, so one launch runs all those of a test that are selected and have the
same ranks and transport. A case fails by itself; those after one that hangs, or loses the device, fail with it. What
is experimental comes last, as it may use up the time there is.
"""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.gpu.models import SCHEDULES

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SECONDS = 240
# Several ranks on one device pass NCCL's check when each seems to be on a host of its own. (With copy engines, too,
# NCCL sums the gradients of stages that two ranks hold.)
OVER_SOCKETS = {
    "NCCL_NET": "Socket",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_MAX_CTAS": "2",
    "NCCL_DEBUG": os.environ.get("NCCL_DEBUG", "WARN"),
}
FEW = ["1f1b", "zbv", "dualpipev", "dualpipe"]
CASES = [
    pytest.param(name, "float32", num_ranks, marks=() if name in FEW and num_ranks == 2 else pytest.mark.nightly)
    for name in SCHEDULES
    for num_ranks in (2, 4)
] + [pytest.param(name, "bfloat16", 4, marks=pytest.mark.nightly) for name in FEW]


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


@dataclass
class Rank:
    """A process, and the file into which it writes all it has to say."""

    process: subprocess.Popen[bytes]
    log: Path

    def said_of(self, case: str) -> str:
        """The end of its line about a case, or of all it said if there is none."""
        text = self.log.read_text(errors="replace")
        lines = (line.split("\t", 1) for line in text.splitlines() if "\t" in line)
        found = next((rest for name, rest in lines if name == case), None)
        return found or f"it did not come to {case} (exit status {self.process.returncode}):\n{text[-3000:]}"


def start(folder: Path, num_ranks: int, cases: Iterable[str], **variables: str) -> list[Rank]:
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(num_ranks)}
    ranks = []
    for rank in range(num_ranks):
        own = {name: str(rank) for name in ("RANK", "LOCAL_RANK", "NCCL_HOSTID")}
        log = folder / f"rank{rank}.txt"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.ranks", *cases],
                cwd=ROOT,
                env=os.environ | OVER_SOCKETS | meeting | own | variables,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        ranks.append(Rank(process, log))
    return ranks


def finish(ranks: list[Rank]) -> None:
    """Wait for all, as long as one launch may take, and leave none behind."""
    until = time.monotonic() + SECONDS
    try:
        for rank in ranks:
            rank.process.wait(max(0.0, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        pass  # the cases that it did not come to say so
    finally:
        for rank in ranks:
            rank.process.kill()
            rank.process.wait()


def selected_beside(item: pytest.Item) -> list[str]:
    """The cases of a test's launch."""

    def facts(one: pytest.Item) -> tuple:
        given = one.callspec.params  # type: ignore[attr-defined]
        return one.originalname, given.get("num_ranks"), given.get("transport")  # type: ignore[attr-defined]

    others = [one for one in item.session.items if one.path == item.path and hasattr(one, "callspec")]
    return [case_of(one.callspec.params) for one in others if facts(one) == facts(item)]


def case_of(given: dict[str, str]) -> str:
    return f"{given['schedule']}:{given.get('dtype', 'float32')}"


Said = Callable[..., list[str]]


@pytest.fixture(scope="module")
def launches() -> dict[tuple, list[Rank]]:
    return {}


@pytest.fixture
def said(
    request: pytest.FixtureRequest, launches: dict[tuple, list[Rank]], tmp_path_factory: pytest.TempPathFactory
) -> Said:
    """What every rank says of a test's case: ``said(num_ranks, **variables)``."""

    def ask(num_ranks: int, **variables: str) -> list[str]:
        key = (num_ranks, *sorted(variables.items()))
        if key not in launches:
            cases = selected_beside(request.node)
            launches[key] = start(tmp_path_factory.mktemp("ranks"), num_ranks, cases, **variables)
            finish(launches[key])
        return [rank.said_of(case_of(request.node.callspec.params)) for rank in launches[key]]

    return ask


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("transport", ["process_group", "process_group_coalesced"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("schedule", FEW)
def test_bits_over_nccl(schedule: str, dtype: str, transport: str, num_ranks: int, said: Said) -> None:
    """Processes that talk by NCCL have the bits of the same kernels run unsplit, for three steps."""
    for text in said(num_ranks, FASTPIPE_TRANSPORT=transport):
        assert text.startswith(f"ok {transport}, "), text


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_recorded_steps(schedule: str, said: Said) -> None:
    """CUDA graphs with NCCL's messages in them have the bits of the same kernels run unsplit."""
    for text in said(2, FASTPIPE_TRANSPORT="process_group", RECORDED="1"):
        assert text.startswith("ok process_group"), text
        assert "1 recorded and 5 replayed" in text


def survivor(folder: Path, victim: int, when: str, transport: str) -> str:
    """What the other one of two ranks says when one is killed."""
    case = "1f1b:float32"
    told = {"FASTPIPE_TRANSPORT": transport, "VICTIM": str(victim), "WHEN": when, "NOTE": str(folder / "note")}
    ranks = start(folder, 2, [case], **told)
    finish(ranks)
    assert ranks[victim].process.returncode == -signal.SIGKILL, ranks[victim].said_of(case)
    return ranks[1 - victim].said_of(case)


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["process_group", "cuda_ipc"])
def test_streams_that_wait_for_a_killed_process_are_released(transport: str, tmp_path: Path) -> None:
    """A process that shares the GPU is killed in mid-step: the other's streams, which wait for what the dead one would
    have sent, come to their end, and the step fails with its rank."""
    assert survivor(tmp_path, 1, "in the step", transport) == "ok lost 1 True"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["process_group", "process_group_coalesced"])
def test_who_waits_for_a_killed_process_to_connect_is_released(transport: str, tmp_path: Path) -> None:
    """A process is killed while the other waits, in the first step, for its first message over NCCL."""
    assert survivor(tmp_path, 1, "connecting", transport) == "ok lost 1 True"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["process_group", "cuda_ipc"])
@pytest.mark.parametrize("victim", [0, 1])
def test_losses_that_a_killed_process_still_owed_are_given_up(transport: str, victim: int, tmp_path: Path) -> None:
    """A process is killed when all hosts are through with the step, and its device is not: who asks for the loss is
    told of the dead one, on the rank that computes it, of messages that never came, as on the other."""
    assert survivor(tmp_path, victim, "late", transport) == f"ok lost {victim} True"


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["cuda_ipc"])
@pytest.mark.parametrize(("schedule", "dtype", "num_ranks"), CASES)
def test_bits(schedule: str, dtype: str, transport: str, num_ranks: int, said: Said) -> None:
    """Processes that copy by the GPU's engines have the bits of the same kernels run unsplit, for three steps."""
    for text in said(num_ranks, FASTPIPE_TRANSPORT=transport):
        assert text.startswith(f"ok {transport}"), text
