"""NVTX ranges of actions, as a profiler gets them: nvtx_listener.cpp stands in for one. No GPU is needed, CUDA is."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from fastpipe.runtime import native

torch = pytest.importorskip("torch")
ROOT = Path(__file__).parents[2]

STEPS = """
import sys, torch, fastpipe
layers = [torch.nn.Linear(4, 4) for _ in range(4)]
pipe = fastpipe.Pipeline(
    layers, "dualpipev", 4, lambda y, t: y.sum(), num_ranks=2, executor="native", overlap="always"
)
x = torch.randn(8, 4)
for trace in (False, False, True):
    print("step", file=sys.stderr, flush=True)
    pipe.step(x, target=x, trace=trace)
print(pipe.schedule.to_csv().replace(",", " "))
"""


@pytest.fixture(scope="module")
def listener(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from building.toolchain import find_toolkit, import_torch

    runtime = native.load()
    if runtime is None or not runtime.has_cuda:
        pytest.skip("the extension was built without csrc/cuda: whether actions are NVTX ranges was not checked")
    source, library = ROOT / "tests/runtime/nvtx_listener.cpp", tmp_path_factory.mktemp("nvtx") / "listener.so"
    include = Path(str(find_toolkit(import_torch())), "include")
    subprocess.run(["c++", "-shared", "-fPIC", f"-I{include}", str(source), "-o", str(library), "-ldl"], check=True)
    return library


@pytest.mark.parametrize("always", ["0", "1"])
def test_actions_are_ranges(listener: Path, always: str) -> None:
    """In traced steps, or in all: every action once, by its name, closed in the thread that opened it."""
    environment = os.environ | {"NVTX_INJECTION64_PATH": str(listener), "FASTPIPE_NVTX": always}
    done = subprocess.run(
        [sys.executable, "-c", STEPS], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr[-3000:]
    texts = done.stdout.split()
    # the backward of a pair runs in a thread of its own, and has a range there
    expected = Counter(texts + [text.partition(";")[2].partition(")")[0] for text in texts if "OVERLAP" in text])
    _, first, untraced, traced = (part.splitlines() for part in done.stderr.split("step\n"))
    assert named(traced) == expected
    assert named(untraced) == (expected if always == "1" else Counter())
    assert set(named(first)) == (set(texts) if always == "1" else set())  # its pairs are run in order


def named(lines: list[str]) -> Counter[str]:
    """How often the range of each action that computes was opened; transfers have some, too. All are closed."""
    found: Counter[str] = Counter()
    depths: Counter[str] = Counter()
    for verb, thread, *name in map(str.split, lines):
        depths[thread] += 1 if verb == "push" else -1
        assert depths[thread] >= 0
        found.update(text for text in name if "SEND" not in text and "RECV" not in text)
    assert not any(depths.values())
    return found


def test_a_variable_that_says_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    if native.load() is None:
        pytest.skip("there is no native executor")
    monkeypatch.setenv("FASTPIPE_NVTX", "yes")
    with pytest.raises(ValueError, match="FASTPIPE_NVTX is 'yes': set it to 1 or 0"):
        import fastpipe

        pipe = fastpipe.Pipeline([torch.nn.Linear(2, 2)], "gpipe", 1, num_ranks=1, executor="native")
        pipe.step(torch.randn(2, 2), output_grad=torch.randn(2, 2))
