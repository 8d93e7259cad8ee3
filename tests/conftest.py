"""What all tests share. It imports no torch: the tests of planning run without it."""

import contextlib
import gc
import importlib.util
import itertools
import os
import random
import signal
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import pytest

from tests.process_state import State

# Before torch is imported: two workers and the processes that they start share the cores already.
os.environ.setdefault("OMP_NUM_THREADS", "1")

WAYS = [("native", "shared_memory"), ("native", "process_group"), ("python", "process_group")]
"""Executors, and transports between processes that go with them."""

HAS_TORCH = importlib.util.find_spec("torch") is not None

# Without torch there is nothing to run; the header of the run says so.
collect_ignore = [] if HAS_TORCH else ["runtime", "distributed", "gpu"]

# torch asks for the name of an address, for its log, at every connection with a store, at both ends. Where the question
# or its answer is lost it is asked again after five seconds, longer than what should come at once may take.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell has its jobs in the background ignore Ctrl-C, and so would Python; there are tests of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


# What takes longest, of processor time or of waits, so that no worker starts on it while the others have nothing to do.
# Each other file has less than 20 s of both.
LONGEST_FIRST = [
    "tests/native/test_core.py",
    "tests/distributed/test_restart_memory.py",
    "tests/runtime/test_streams.py",
    "tests/distributed/test_mesh.py",
    "tests/distributed/test_death.py",
    "tests/distributed/test_mesh_failure.py",
    "tests/runtime/test_readme.py",
    "tests/distributed/test_bits.py",
    "tests/distributed/test_failure.py",
    "tests/distributed/test_all_to_all.py",
    "tests/distributed/test_mesh_layouts.py",
    "tests/integrations/test_torchtitan.py",
    "tests/integrations/test_transformers.py",
    "tests/runtime/test_bits.py",
    "tests/distributed/test_lost_host.py",
    "tests/distributed/test_mixed.py",
    "tests/distributed/test_endurance.py",
    "tests/distributed/test_building.py",
    "tests/distributed/test_data_parallel.py",
    "tests/runtime/test_split_hugging_face.py",
    "tests/runtime/test_example_train_gpt.py",
    "tests/unit/test_native_plan_sanitized.py",
    "tests/integrations/test_launching.py",
    "tests/runtime/test_native_build.py",
    "tests/distributed/test_control.py",
]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--shuffle", metavar="SEED", help="run files, and the tests of each, in a random order")
    parser.addoption("--fresh-examples", action="store_true", help="have Hypothesis take other examples at each run")


def pytest_configure(config: pytest.Config) -> None:
    with contextlib.suppress(ImportError):
        from hypothesis import settings

        settings.register_profile("fastpipe", derandomize=not config.getoption("--fresh-examples"))
        settings.load_profile("fastpipe")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Order the files; a file stays together, since its fixtures may be expensive."""
    files: dict[str, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.nodeid.partition("::")[0], []).append(item)
    if seed := config.getoption("--shuffle"):
        chance = random.Random(seed)
        order = chance.sample(sorted(files), len(files))
        for file in order:
            chance.shuffle(files[file])
    else:
        longest = {file: place for place, file in enumerate(LONGEST_FIRST)}
        order = sorted(files, key=lambda file: longest.get(file, len(longest)))
    items[:] = [item for file in order for item in files[file]]


def native_expected() -> bool:
    """Whether a missing native executor is a failure rather than a reason to skip."""
    return any(os.environ.get(name, "0") not in ("", "0") for name in ("CI", "FASTPIPE_REQUIRE_NATIVE"))


def skip_without_native() -> None:
    """Skip where there is no native executor, for the reason that `native_status` gives; fail where one is expected."""
    from fastpipe.runtime import native

    if native.load() is None:
        give_up = pytest.fail if native_expected() else pytest.skip
        give_up(native.native_status())


def pytest_report_header() -> list[str]:
    from fastpipe.runtime.native import native_status

    torch = "" if HAS_TORCH else "torch is not installed: only planning is tested\n"
    return [f"{torch}fastpipe: {native_status()}"]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What is there after collection, all of torch say, stays: to look for cycles in it would only take time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def the_process_is_left_as_it_was(request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """A test fails that leaves the process otherwise than it found it; tests/process_state.py says in what.

    The default generator is put back, as tests seed it. What a failed test leaves is held by its traceback.
    """
    torch = sys.modules.get("torch")
    generator = torch.get_rng_state() if torch else None
    before = State.now()
    yield
    # what fixtures gave, pipelines say, is let go; None if Ctrl-C ends the test
    (request.node.funcargs or {}).clear()
    for phase in ("setup", "call"):  # DCP logs exceptions as objects, whose tracebacks hold pipelines
        caplog.get_records(phase).clear()
    if torch:
        torch.set_rng_state(generator)
    # CUDA, once it has begun, keeps threads, descriptors and processes of its own
    has_device = torch is not None and torch.cuda.is_available()
    if not hasattr(sys, "last_value") and (left := before.left_behind(open_ones=not has_device)):
        pytest.fail("the test left behind:\n" + "\n".join(left), pytrace=False)


def paired(cases: Iterable[tuple[Any, ...] | str]) -> list[tuple[Any, ...]]:
    """Each case with one of the executors in turn, as its last value.

    Every schedule meets every executor in test_bits.py; a feature needs not have that again.
    """
    values = ((case,) if isinstance(case, str) else case for case in cases)
    return [(*case, executor) for case, executor in zip(values, itertools.cycle(["native", "python"]), strict=False)]


def executors_in_turn(names: str, cases: Iterable[tuple[Any, ...] | str], **options: Any) -> pytest.MarkDecorator:
    """Parameters of a test, and ``executor``: `paired` ones."""
    return pytest.mark.parametrize(f"{names}, executor", paired(cases), indirect=["executor"], **options)


BOTH = pytest.mark.parametrize("executor", ["native", "python"], indirect=True)
"""For a test between processes, which has one of the executors otherwise."""

NATIVE = pytest.mark.parametrize("executor", ["native"], indirect=True)
"""For a test of what the native executor alone has."""


def overlap_of(executor: str) -> str:
    """``Pipeline(overlap=)`` for pairs that overlap if they can: the Python executor refuses "always"."""
    return "always" if executor == "native" else "auto"


@pytest.fixture(params=["python", "native"])
def executor(request: pytest.FixtureRequest) -> str:
    """Each of the executors."""
    if request.param == "native":
        skip_without_native()
    return str(request.param)
