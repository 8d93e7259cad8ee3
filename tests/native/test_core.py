"""The C++ core, with a stub in place of torch, on random programs under the compiler's sanitizers."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.native.build import ROOT, SANITIZERS, SanitizedCore

NUM_PROGRAMS = 60


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SanitizedCore]:
    """``core(sanitizer)``: built and started when it is first asked for."""
    built: dict[str, SanitizedCore] = {}

    def build(sanitizer: str) -> SanitizedCore:
        if sanitizer not in built:
            folder = tmp_path_factory.mktemp("core")
            built[sanitizer] = SanitizedCore(sanitizer, folder, [str(NUM_PROGRAMS)])
        return built[sanitizer]

    return build


@pytest.mark.parametrize("name", sorted(file.stem for file in ROOT.glob("tests/native/*_test.cpp")))
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_random_programs_run_clean(sanitizer: str, name: str, core: Callable[[str], SanitizedCore]) -> None:
    """Loopback: threads, with and without delay. Shared memory, and the exchange beside it: threads and processes, some
    of which are killed. Both in one program, for ranks of several hosts. Copy engines: queues of threads.
    Allocations: none where nothing is new."""
    ran = core(sanitizer).runs[name].result()
    assert ran.returncode == 0, ran.stdout + ran.stderr
    what = "exchanges" if name == "exchange_test" else "programs"
    assert ran.stdout == f"{NUM_PROGRAMS} {what}: ok\n"
