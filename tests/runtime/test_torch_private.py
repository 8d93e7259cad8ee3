"""The private names behind the door are there, in this torch and, nightly, in the newest that installs."""

import ast
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fastpipe.cli.checks import diagnosis
from fastpipe.runtime.common import torch_private
from tests.unit.test_private_names import is_own, is_private

ROOT = Path(__file__).resolve().parents[2]


def test_all_private_names_are_there() -> None:
    assert torch_private.missing() == {}


def test_every_private_name_that_is_used_is_looked_for() -> None:
    used = {
        node.attr
        for node in ast.walk(ast.parse(Path(torch_private.__file__).read_text()))
        if isinstance(node, ast.Attribute) and is_private(node.attr) and not is_own(node.value)
    }
    listed = [*torch_private.PRIVATE, torch_private.CUDA, torch_private.NCCL]
    words = {word for one in listed for word in f"{one.owner} {one.names}".replace(".", " ").replace("|", " ").split()}
    assert used - words - {"_C", "_autograd", "_functorch"} == set()


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("torch._C", "_no_such_function"),
        ("torch.no_such_module", "anything"),
        ("torch.Tensor", "_no_such|_nor_this"),
        ("torch.nn.parallel.DistributedDataParallel", "_no_such_attribute"),
        ("torch.utils.checkpoint", "_checkpoint_hook.__init__.<locals>.no_such_hook"),
        ("torch.utils.checkpoint", "_no_such_hook.__init__.<locals>.unpack_hook"),
        ("/proc", "no/such/file"),
        (nn.Module, "_no_such_attribute"),
    ],
)
def test_a_name_that_is_gone_is_missed(owner: object, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = torch_private.Private(owner, name, "a test", "that test")  # type: ignore[arg-type]
    monkeypatch.setattr(torch_private, "PRIVATE", (*torch_private.PRIVATE[:1], gone))
    assert list(torch_private.missing().values()) == ["that test"]


def test_collectives_are_counted_by_the_backend_of_the_groups_device() -> None:
    """Of a process group for CPUs and GPUs the default backend may be the other one, which counts its own."""
    counts = {"cpu": 3, "meta": 5}
    own = {kind: SimpleNamespace(_get_sequence_number_for_group=lambda n=n: n) for kind, n in counts.items()}
    shards = SimpleNamespace(_get_sequence_number_for_group=lambda: 3, _get_backend=lambda device: own[device.type])
    group = SimpleNamespace(mesh_info=SimpleNamespace(shard_process_group=shards), device=torch.device("meta"))
    assert torch_private.fsdp_collectives(group) == [(shards, 5), (None, -1)]


def test_every_entry_says_what_for_and_what_fails_without() -> None:
    assert all(one.use and one.without for one in torch_private.PRIVATE)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_recompute_is_told_from_a_forward_within_a_backward(use_reentrant: bool) -> None:
    seen: list[tuple[str, bool]] = []
    phase = "forward"

    def layer(x: torch.Tensor) -> torch.Tensor:
        seen.append((phase, torch_private.is_recomputing()))
        return x.sin()

    x = torch.ones(2, requires_grad=True)
    y = checkpoint(layer, x, use_reentrant=use_reentrant)
    y.register_hook(lambda grad: (layer(x), grad)[1])
    phase = "backward"
    y.sum().backward()
    # the hook, which is a forward of its own, and then the checkpoint
    assert seen == [("forward", False), ("backward", False), ("backward", True)]


def test_what_is_noted_in_a_thread_keeps_its_references() -> None:
    value, nothing = object(), sys.getrefcount(None)
    before = sys.getrefcount(value)
    for _ in range(1000):
        with torch_private.noted_in_thread("fastpipe.test", value):
            assert torch_private.find_in_thread("fastpipe.test") is value
    assert sys.getrefcount(value) == before
    assert abs(sys.getrefcount(None) - nothing) < 500  # others use None meanwhile


def test_doctor_names_what_torch_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_private, "missing", lambda: {"torch._C._lost": "add_loss"})
    assert "torch._C._lost, without which this does not work: add_loss" in diagnosis()["private"]


CHECK = """
import json, torch
from fastpipe.runtime.common import torch_private
print(json.dumps([torch.__version__, torch_private.missing()]))
"""


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_all_private_names_are_in_the_newest_torch(tmp_path: Path) -> None:
    """It is installed into an environment of its own."""
    plan = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps"]
    asked = subprocess.run([*plan, "--report", "-", "torch"], capture_output=True, text=True, timeout=600, check=False)
    if asked.returncode:
        pytest.skip(f"no torch can be had: {asked.stderr.strip().splitlines()[-1:]}")
    newest = json.loads(asked.stdout)["install"][0]["metadata"]["version"].partition("+")[0]
    if newest == torch.__version__.partition("+")[0]:
        pytest.skip(f"torch {newest}, which is the newest that can be had, is the one of these tests")
    venv = tmp_path / "venv"
    subprocess.run([sys.executable, "-m", "venv", str(venv)], check=True, timeout=600)
    try:
        install = [str(venv / "bin" / "python"), "-m", "pip", "install", "--quiet", f"torch=={newest}", "numpy"]
        installed = subprocess.run(install, capture_output=True, text=True, timeout=2400, check=False)
        if installed.returncode:
            pytest.skip(f"torch {newest} does not install: {installed.stderr.strip().splitlines()[-1:]}")
        command = [str(venv / "bin" / "python"), "-c", CHECK]
        environment = os.environ | {"PYTHONPATH": str(ROOT)}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=600, env=environment, check=False)
        assert ran.returncode == 0, ran.stderr
        version, missing = json.loads(ran.stdout.splitlines()[-1])
        assert (version.partition("+")[0], missing) == (newest, {})
    finally:
        shutil.rmtree(venv)
