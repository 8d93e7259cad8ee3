"""The C++ core, with a stub in place of torch, on random programs under the compiler's sanitizers."""

import itertools
import time

import pytest

from tests.native.build import ALONE, SANITIZERS, TOGETHER, SanitizedCore
from tests.patience import PATIENCE
from tests.process_state import shared

FEW, MANY = 16, 400
# The first test waits for what all of them need to be built.
pytestmark = pytest.mark.timeout(4 * PATIENCE)


@pytest.fixture(scope="module", params=[FEW, pytest.param(MANY, marks=pytest.mark.nightly)])
def cores(request: pytest.FixtureRequest) -> tuple[int, dict[str, SanitizedCore]]:
    """How many programs: the same few every day, others every night. By sanitizer; those of one run while another is
    built."""
    first = 0 if request.param == FEW else int(time.time()) % 10**9
    print("the first seed is", first)
    with shared():
        return request.param, {name: SanitizedCore(name, [str(request.param), str(first)]) for name in SANITIZERS}


@pytest.mark.parametrize(
    ("sanitizer", "name"), [*itertools.product(SANITIZERS, TOGETHER), (SANITIZERS[0], ALONE)], ids=str
)
def test_random_programs_run_clean(sanitizer: str, name: str, cores: tuple[int, dict[str, SanitizedCore]]) -> None:
    """Loopback: threads, with and without delay. Shared memory, and the exchange beside it: threads and processes, some
    of which are killed. Both in one program, for ranks of several hosts. Copy engines: queues of threads.
    Allocations: none where nothing is new."""
    count, by_sanitizer = cores
    ran = by_sanitizer[sanitizer].runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    what = "exchanges" if name == "exchange_test" else "programs"
    assert ran.stdout == f"{count} {what}: ok\n"
