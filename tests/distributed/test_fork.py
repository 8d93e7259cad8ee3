"""Forked children of a rank: they let go of what it shares with the others, and the ranks go on."""

import gc

import pytest

from tests.conftest import skip_without_native
from tests.distributed.hosts import on_hosts
from tests.distributed.ranks import GroupOf
from tests.forks import in_child
from tests.runtime.checks import rows_for, train_and_compare
from tests.runtime.models import CASES

COUNT = 8


def fork(transport: str, hosts: str) -> tuple[int, str]:
    """Runs on every rank: a child, whose pipeline is dropped, between two steps; how it ended."""
    with on_hosts(hosts):
        held = [train_and_compare("plain", "dualpipev", COUNT, transport=transport, overlap="always")]

    def drop() -> None:
        held.clear()
        gc.collect()

    status = in_child(drop)
    batch = CASES["plain"].batches(1, rows_for(COUNT))[0]
    held[0].step(*batch.args, target=batch.target)
    return status, held[0].transport.kind


@pytest.mark.parametrize(
    ("transport", "hosts"), [("shared_memory", ""), ("process_group", ""), ("auto", "aab")], ids=["near", "far", "both"]
)
def test_a_child_may_let_go_of_a_pipeline(transport: str, hosts: str, group_of: GroupOf) -> None:
    skip_without_native()
    kind = "mixed" if hosts else transport
    assert group_of(3).run(fork, transport, hosts) == [(0, kind)] * 3
