"""The processes that the tests here share."""

from collections.abc import Callable, Iterator

import pytest

from tests.distributed.ranks import Ranks
from tests.process_state import shared


@pytest.fixture(scope="session")
def group_of() -> Iterator[Callable[[int], Ranks]]:
    """``group_of(4)``: four ranks, kept from test to test while they are usable."""
    started: dict[int, Ranks] = {}

    def group(size: int) -> Ranks:
        if size in started and not started[size].usable:
            started.pop(size).kill()
        if size not in started:
            with shared():
                started[size] = Ranks(size)
        return started[size]

    yield group
    for ranks in started.values():
        if ranks.usable:
            ranks.close()
        else:
            ranks.kill()
