"""What all tests share. It imports no torch: the tests of planning run without it."""

import gc
import importlib.util
import os
import signal
from collections.abc import Generator

import pytest

HAS_TORCH = importlib.util.find_spec("torch") is not None

# Without torch there is nothing to run; the header of the run says so.
collect_ignore = [] if HAS_TORCH else ["runtime", "distributed", "gpu"]

# torch asks for the name of an address, for its log, at every connection with a store, at both ends. Where the question
# or its answer is lost it is asked again after five seconds, longer than what should come at once may take.
os.environ.setdefault("RES_OPTIONS", "timeout:1")

# A shell has its jobs in the background ignore Ctrl-C, and so would Python; there are tests of it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


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


@pytest.fixture(params=["python", "native"])
def executor(request: pytest.FixtureRequest) -> str:
    """Each of the executors."""
    if request.param == "native":
        skip_without_native()
    return str(request.param)
