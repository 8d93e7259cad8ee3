"""The planning library under the address and undefined-behaviour sanitizers, on right and on mutated input."""

import os
import shutil
import subprocess
import sys

import pytest

from tests.native.build import ROOT, Sanitized
from tests.patience import PATIENCE

RUN = """
import sys, warnings
from pathlib import Path
warnings.simplefilter("ignore")
from fastpipe import Schedule, ScheduleError, native_plan
native_plan.PATH = Path(sys.argv[1])
assert native_plan.library() is not None, native_plan.status()
from tests.unit import test_native_plan as same
from tests.unit.planning import small_schedules, with_columns
for schedule in small_schedules():
    same.check_schedule(schedule)
    program = same.lower(schedule)
    lanes = list(range(len(program.channels)))
    for seed in range(20):
        columns = same.mutated_columns(program.columns, 15, seed)
        mutated = with_columns(program, columns)
        native_plan.is_valid_program(mutated, lanes)
        native_plan.simulate(mutated, lanes, same.COSTS[1])
        try:
            columns = same.mutated_columns(schedule.columns, 8, seed)
            wrong = Schedule("mutated", schedule.placement, schedule.num_microbatches, columns)
        except ScheduleError:
            continue
        native_plan.is_valid_schedule(wrong)
        native_plan.lower(wrong, seed % 3, 0)
from fastpipe.planner import engine
from fastpipe.planner.search import Keys, unordered
from tests.unit import test_planner_tasks as planner
from tests.unit.planning import improved
for case in planner.NAMED:
    schedule = planner.made(*case)
    tasks = planner.tight(schedule, planner.uneven(schedule.num_stages))
    for seed in range(3):
        improved(tasks, tasks.start, span=bool(seed % 2), seed=seed, attempts=500, hot=1.0, cold=0.01)
    engine.retime(tasks, tasks.start[::-1].copy())  # each rank gets tasks of another: refused
    placement, costs = schedule.placement, planner.uneven(schedule.num_stages)
    loose = planner.tasks_of(unordered(placement, 4), costs, [1.0] * placement.num_stages, [4.0] * placement.num_ranks)
    for order, _ in Keys(loose, 1).orders(20, True) if placement.num_routes == 1 else ():
        assert engine.retime(loose, order) is not None
from tests.unit import test_rounds as rounds
for name, options in rounds.SEARCHED:
    for m in (1, 2, 9):
        rounds.make_schedule(name, num_ranks=4, num_microbatches=m, **options)
print("clean")
"""


def runtime_libraries(compiler: str) -> list[str]:
    """What has to be loaded before an interpreter that was not built with the sanitizers."""
    asked = [[compiler, f"-print-file-name=lib{name}.so"] for name in ("asan", "ubsan")]
    return [subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip() for ask in asked]


def test_no_memory_error_and_no_undefined_behaviour() -> None:
    compiler = shutil.which("g++")
    if compiler is None or not all(map(os.path.isabs, libraries := runtime_libraries(compiler))):
        pytest.skip("no g++ with its sanitizers")
    build = Sanitized("address,undefined")
    library = build.link(build.compile(sorted(ROOT.glob("csrc/plan/*.cpp")), "-fPIC"), "_plan.so", "-shared")
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(libraries),
        "ASAN_OPTIONS": "detect_leaks=0",  # the interpreter's own are none of ours
        "PYTHONPATH": str(ROOT),
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(library)], env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert done.returncode == 0 and done.stdout.strip() == "clean", done.stderr[-4000:]
