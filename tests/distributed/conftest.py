"""The processes that the tests here share, and which executor they have."""

import zlib
from collections.abc import Callable, Iterator

import pytest

from fastpipe.runtime import native
from tests.conftest import native_expected, skip_without_native
from tests.distributed.ranks import Ranks
from tests.process_state import shared


@pytest.fixture(scope="session")
def started() -> Iterator[dict[int, Ranks]]:
    """The groups of ranks that there are, by their size."""
    groups: dict[int, Ranks] = {}
    yield groups
    for ranks in groups.values():
        if ranks.usable:
            ranks.close()
        else:
            ranks.kill()


@pytest.fixture(scope="module")
def group_of(started: dict[int, Ranks]) -> Iterator[Callable[[int], Ranks]]:
    """``group_of(4)``: four ranks, kept from test to test while they are usable.

    Behind a module they are stopped until they are asked for, and not before: what they still collect may hold
    connections of the test's.
    """

    def group(size: int) -> Ranks:
        if size in started and not started[size].usable:
            started.pop(size).kill()
        if size not in started:
            with shared():
                started[size] = Ranks(size)
        started[size].resume()
        return started[size]

    yield group
    for ranks in started.values():
        ranks.pause()


@pytest.fixture
def executor(request: pytest.FixtureRequest) -> str:
    """The one that a test is parametrized with, or one of them by the test's name: where both matter is ``BOTH``.

    They run the same schedules, failures and deaths in test_bits.py, test_failure.py and test_death.py, and everything
    that is no matter of processes in tests/runtime.
    """
    turns = ["native", "python"] if native.load() or native_expected() else ["python"]
    name = getattr(request, "param", turns[zlib.crc32(request.node.nodeid.encode()) % len(turns)])
    if name == "native":
        skip_without_native()
    return str(name)
