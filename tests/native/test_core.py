"""The C++ core, with a stub in place of torch, on random programs under the compiler's sanitizers."""

import itertools

import pytest

from tests.native.build import ALONE, SANITIZERS, TOGETHER, SanitizedCore
from tests.patience import PATIENCE
from tests.process_state import shared

NUM_PROGRAMS = 40
# The first test waits for what all of them need to be built.
pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module")
def cores() -> dict[str, SanitizedCore]:
    """By sanitizer; the programs of one run while another is built."""
    with shared():
        return {name: SanitizedCore(name, [str(NUM_PROGRAMS)]) for name in SANITIZERS}


@pytest.mark.parametrize(
    ("sanitizer", "name"), [*itertools.product(SANITIZERS, TOGETHER), (SANITIZERS[0], ALONE)], ids=str
)
def test_random_programs_run_clean(sanitizer: str, name: str, cores: dict[str, SanitizedCore]) -> None:
    """Loopback: threads, with and without delay. Shared memory, and the exchange beside it: threads and processes, some
    of which are killed. Both in one program, for ranks of several hosts. Copy engines: queues of threads.
    Allocations: none where nothing is new."""
    ran = cores[sanitizer].runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    what = "exchanges" if name == "exchange_test" else "programs"
    assert ran.stdout == f"{NUM_PROGRAMS} {what}: ok\n"
