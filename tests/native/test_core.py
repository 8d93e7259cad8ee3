"""The C++ core, with a stub in place of torch, on random programs under the compiler's sanitizers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.native.build import ALONE, SANITIZERS, TOGETHER, SanitizedCore

NUM_PROGRAMS = 60


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], SanitizedCore]]:
    """``core(sanitizer)``: one is built while the programs of another run."""
    arguments = [str(NUM_PROGRAMS)]
    with ThreadPoolExecutor(1) as builder:
        built = {
            sanitizer: builder.submit(SanitizedCore, sanitizer, tmp_path_factory.mktemp("core"), arguments)
            for sanitizer in SANITIZERS
        }
        yield lambda sanitizer: built[sanitizer].result()


@pytest.mark.parametrize(
    ("sanitizer", "name"), [*itertools.product(SANITIZERS, TOGETHER), (SANITIZERS[0], ALONE)], ids=str
)
def test_random_programs_run_clean(sanitizer: str, name: str, core: Callable[[str], SanitizedCore]) -> None:
    """Loopback: threads, with and without delay. Shared memory, and the exchange beside it: threads and processes, some
    of which are killed. Both in one program, for ranks of several hosts. Copy engines: queues of threads.
    Allocations: none where nothing is new."""
    ran = core(sanitizer).runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    what = "exchanges" if name == "exchange_test" else "programs"
    assert ran.stdout == f"{NUM_PROGRAMS} {what}: ok\n"
