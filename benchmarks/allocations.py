"""Where the native executor allocates in a step in which nothing is new: ``python benchmarks/allocations.py``.

Counts the calls of ``operator new`` that fastpipe's own library makes, by the function they come from, over steps of
launch-bound stages on two ranks; those of everybody else in the process, torch's tensors and graphs most of all, are
one number. Needs g++ and addr2line.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from contenders import fastpipe_step
from overhead import make_work
from ranks import ranks
from tables import table

from fastpipe import make_schedule

_CAPACITY = 4096
_LIBRARY = "FASTPIPE_ALLOCATIONS"
_ONCE_A_STEP = 4
"""What is called at most so often in a step is one line of the table."""
SCHEDULES = ("1f1b", "interleaved_zb", "dualpipev")


class Counted(NamedTuple):
    """Calls of ``operator new``: fastpipe's by address in its library, and everybody's."""

    places: dict[int, int]
    everybody: int


def build(folder: str) -> str:
    """The library that counts."""
    made = f"{folder}/allocations.so"
    source = str(Path(__file__).with_suffix(".cpp"))
    subprocess.run(["g++", "-std=c++17", "-O2", "-shared", "-fPIC", source, "-o", made], check=True)
    return made


def extension() -> Path:
    """The library of the native executor."""
    from fastpipe import _runtime

    return Path(_runtime.__file__)


def mapped(library: Path) -> tuple[int, int]:
    """Where it lies in this process."""
    lines = [line for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith(str(library))]
    bounds = [int(bound, 16) for line in lines for bound in line.split(maxsplit=1)[0].split("-")]
    return min(bounds), max(bounds)


def count(step: Callable[[], Any], num_steps: int) -> Counted:
    """What some steps allocate, after some more."""
    counter = ctypes.CDLL(os.environ[_LIBRARY])
    begin, end = mapped(extension())
    for _ in range(5):
        step()
    counter.allocations_begin(ctypes.c_size_t(begin), ctypes.c_size_t(end))
    for _ in range(num_steps):
        step()
    addresses, calls = (ctypes.c_size_t * _CAPACITY)(), (ctypes.c_uint64 * _CAPACITY)()
    everybody = ctypes.c_uint64()
    found = counter.allocations_end(addresses, calls, ctypes.c_size_t(_CAPACITY), ctypes.byref(everybody))
    return Counted({addresses[i] - begin: calls[i] for i in range(found)}, everybody.value)


def function_at(address: int) -> str:
    """The innermost function of fastpipe's that the place was inlined into, or is in."""
    # the return address is behind the call
    command = ["addr2line", "-Cfie", str(extension()), hex(address - 1)]
    lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    frames = list(zip(lines[::2], lines[1::2], strict=True))
    name = next((name for name, file in frames if "csrc/" in file), frames[-1][0])
    shorter = re.sub(r"<.*>|\(anonymous namespace\)::|fastpipe::|\[.*\]", "", name)
    return re.sub(r"\(.*", "", shorter)


def rows(name: str, num_microbatches: int, num_steps: int) -> list[list[str]]:
    """A schedule's rows of the table, of the rank that allocates most."""
    schedule = make_schedule(name, num_ranks=2, num_microbatches=num_microbatches)
    work = make_work(num_microbatches)

    def tasks(rank: int) -> dict[str, Any]:
        step = fastpipe_step(schedule, rank, work, executor="native")
        return {"count": lambda: count(step, num_steps)}

    with ranks(2, tasks) as group:
        counted = max(group.call("count"), key=lambda each: sum(each.places.values()))
    actions = num_steps * schedule.num_stages * num_microbatches / 2
    by_function: Counter[str] = Counter()
    for address, calls in counted.places.items():
        by_function[function_at(address)] += calls
    own = sum(by_function.values())
    often = [(where, calls) for where, calls in by_function.most_common() if calls > num_steps * _ONCE_A_STEP]
    rest = own - sum(calls for _, calls in often)
    lines = [*often, ("a few times a step", rest), ("everybody else", counted.everybody - own)]
    return [[name, where, f"{calls / actions:,.2f}"] for where, calls in lines]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--schedules", nargs="+", default=SCHEDULES, metavar="NAME")
    options.add_argument("--microbatches", type=int, default=64)
    options.add_argument("--steps", type=int, default=10)
    options.add_argument("--markdown", action="store_true", help="a table as README.md has them")
    chosen = options.parse_args()
    if _LIBRARY not in os.environ:
        with tempfile.TemporaryDirectory() as folder:
            made = build(folder)
            environment = {**os.environ, _LIBRARY: made, "LD_PRELOAD": made}
            sys.exit(subprocess.run([sys.executable, *sys.argv], env=environment, check=False).returncode)
    heads = ["schedule", "where", "a (stage, microbatch)"]
    found = [row for name in chosen.schedules for row in rows(name, chosen.microbatches, chosen.steps)]
    print(table(heads, found, markdown=chosen.markdown))


if __name__ == "__main__":
    main()
