"""docs/launching.md: its files, as far as they run without a cluster."""

import os
import re
import shlex
import socket
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.scripts import REPOSITORY, command

LAUNCH = REPOSITORY / "examples/launch"
SRUN = """
shift  # --kill-on-bad-exit=1
FASTPIPE_HOST=first "$@" &
FASTPIPE_HOST=second "$@" || status=$?
wait $! || status=$?
exit ${status:-0}
"""
"""Two nodes, which share nothing as far as fastpipe knows."""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_slurm_s_file_starts_two_agents_of_torchrun(tmp_path: Path) -> None:
    programs = {
        "srun": SRUN,
        "scontrol": "echo 127.0.0.1",
        "torchrun": f'exec {shlex.quote(sys.executable)} -m torch.distributed.run "$@"',
    }
    for name, script in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{script}\n")
        (tmp_path / name).chmod(0o755)
    shown = command(
        ["bash", str(LAUNCH / "slurm.sh")],
        REPOSITORY,
        PATH=f"{tmp_path}{os.pathsep}{os.environ['PATH']}",
        SLURM_JOB_ID="7",
        SLURM_JOB_NUM_NODES="2",
        SLURM_JOB_NODELIST="node[1-2]",
        SCRIPT="examples/quickstart.py",
        PROCESSES="1",
        PORT=str(free_port()),
    )
    found = re.findall(r"rank (\d), step (\d): loss (\d\.\d{4})", shown)
    by_rank = [{step: loss for who, step, loss in found if who == rank} for rank in "01"]
    assert by_rank[0] == by_rank[1] and len(by_rank[0]) == 10, shown


def test_kubernetes_file_asks_for_the_same_workers_twice() -> None:
    yaml: Any = pytest.importorskip("yaml")
    job = yaml.safe_load((LAUNCH / "pytorchjob.yaml").read_text())
    worker = job["spec"]["pytorchReplicaSpecs"]["Worker"]
    (container,) = worker["template"]["spec"]["containers"]
    elastic = job["spec"]["elasticPolicy"]
    assert elastic["minReplicas"] == elastic["maxReplicas"] == worker["replicas"]
    assert int(job["spec"]["nprocPerNode"]) == container["resources"]["limits"]["nvidia.com/gpu"]
    assert (REPOSITORY / container["command"][1]).is_file()
    mounted = {mount["name"] for mount in container["volumeMounts"]}
    assert mounted == {volume["name"] for volume in worker["template"]["spec"]["volumes"]}


@pytest.mark.nightly
@pytest.mark.skipif(not find_spec("ray"), reason="ray is not installed: pip install 'ray[train]'")
def test_ray_s_script_trains_on_this_machine() -> None:
    words = [sys.executable, str(LAUNCH / "ray_train.py")]
    shown = command(words, REPOSITORY, RAY_TRAIN_V2_ENABLED="1", RAY_DEDUP_LOGS="0")
    by_rank = [dict(re.findall(rf"rank {rank}, (step \d): loss (\d\.\d{{6}})", shown)) for rank in "01"]
    assert by_rank[0] == by_rank[1] and len(by_rank[0]) == 3, shown[-3000:]
