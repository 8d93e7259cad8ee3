"""Steps of several processes that share one GPU, over NCCL and by its copy engines."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
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


@pytest.mark.timeout(SECONDS + 60)
@pytest.mark.parametrize("transport", ["process_group", "cuda_ipc"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipev", "dualpipe"])
def test_bits(schedule: str, num_ranks: int, dtype: str, transport: str, executor: str) -> None:
    """Processes, over NCCL and by copy engines, have the bits of the same kernels run unsplit, for three steps."""
    port = free_port()
    ranks = []
    for rank in range(num_ranks):
        meeting = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(num_ranks), "NCCL_HOSTID": str(rank)}
        meeting |= {"FASTPIPE_TRANSPORT": transport, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        ranks.append(
            subprocess.Popen(
                [sys.executable, "-m", "tests.gpu.ranks", schedule, dtype, executor],
                cwd=ROOT,
                env=os.environ | OVER_SOCKETS | meeting,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        for process in ranks:
            out, errors = process.communicate(timeout=SECONDS)
            assert process.returncode == 0, errors[-3000:]
            assert out.startswith(f"ok {transport}")
    finally:
        for process in ranks:
            process.kill()
