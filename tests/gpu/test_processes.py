"""Steps of several processes that share one GPU, over NCCL and by its copy engines."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
SECONDS = 240
# Several ranks on one device pass NCCL's check when each seems to be on a host of its own. (With copy engines, too,
# NCCL sums the gradients of stages that two ranks hold.)
OVER_SOCKETS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "CUDA_DEVICE_MAX_CONNECTIONS": "32",
}


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return int(listening.getsockname()[1])


def start(num_ranks: int, *arguments: str, **variables: str) -> list[subprocess.Popen[str]]:
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        meeting = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "NCCL_HOSTID": str(rank)}
        meeting |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.ranks", *arguments],
                cwd=ROOT,
                env=os.environ | OVER_SOCKETS | meeting | variables,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    return ranks


def outputs(ranks: Sequence[subprocess.Popen[str]]) -> list[str]:
    """What the ranks print, all of which have to end well; none is left behind."""
    printed = []
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-3000:]
            printed.append(out)
    finally:
        for process in ranks:
            process.kill()
    return printed


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["process_group", "cuda_ipc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "dualpipe"])
def test_bits(schedule: str, num_ranks: int, dtype: str, transport: str, executor: str) -> None:
    """Processes, over NCCL and by copy engines, have the bits of the same kernels run unsplit, for three steps."""
    for out in outputs(start(num_ranks, schedule, dtype, executor, FASTPIPE_TRANSPORT=transport)):
        assert out.startswith(f"ok {transport}")


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev"])
def test_recorded_steps(schedule: str, executor: str) -> None:
    """CUDA graphs with NCCL's messages in them have the bits of the same kernels run unsplit."""
    for out in outputs(start(2, schedule, "float32", executor, FASTPIPE_TRANSPORT="process_group", RECORDED="1")):
        assert "1 recorded and 5 replayed" in out


@pytest.mark.timeout(SECONDS + 60)
def test_streams_that_wait_for_a_killed_process_are_released(executor: str) -> None:
    """A process that shares the GPU is killed in mid-step: the other's streams, which wait for flags that the dead one
    would have set, come to their end, and the step fails with its rank."""
    first, victim = start(2, "1f1b", "float32", executor, FASTPIPE_TRANSPORT="cuda_ipc", VICTIM="1")
    try:
        out, errors = first.communicate(timeout=SECONDS)
        assert out.splitlines()[1:] == ["lost 1 True"], errors[-3000:]
        assert victim.wait(timeout=SECONDS) == -signal.SIGKILL
    finally:
        first.kill()
        victim.kill()
