"""Run a script under torchrun and kill ranks of it, one an attempt:

    KILLS=construction:1,step2:0 NOTES=folder torchrun --max-restarts 2 tests/distributed/killed.py SCRIPT ARGUMENTS

Rank 1 is killed in the first attempt, rank 0 in the second one. A file in the folder says that a kill has happened,
since agents of two hosts count restarts separately. Rank 0 writes into ``folder.steps`` when the second step of an
attempt has ended, the first of training: train_gpt.py begins with one that it compares.
"cut4:0" does not kill: it waits in a step for the test to take the link down. TIMEOUT is the default of `Pipeline`.
"""

import itertools
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.nn.modules.module import register_module_forward_pre_hook

import fastpipe.runtime.checkpoint as checkpoint
import fastpipe.runtime.memory_checkpoint as memory_checkpoint
import fastpipe.runtime.pipeline as pipeline

Kill = Callable[[], None]


def around(owner: Any, name: str, before: Callable[[], None], after: Callable[[], None] = lambda: None) -> None:
    """Call something before and after a function."""
    call = getattr(owner, name)

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        before()
        result = call(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)


def within(method: str, number: int, kill: Kill) -> None:
    """Kill in the midst of the given call of a method of Pipeline, in the second forward of a layer."""
    count = {"calls": 0, "forwards": 0}

    def called() -> None:
        count["calls"] += 1

    def forward(*_: Any) -> None:
        count["forwards"] += count["calls"] == number
        if count["forwards"] == 2:
            kill()

    around(pipeline.Pipeline, method, called)
    register_module_forward_pre_hook(forward)


def before_call(owner: Any, name: str, number: int, kill: Kill) -> None:
    """Kill before the given call of a function."""
    calls = itertools.count(1)
    around(owner, name, lambda: kill() if next(calls) == number else None)


def arm(point: str, kill: Kill) -> None:
    """Have this process killed at a point: where it is built, in a step, and so on."""
    name, number = point.rstrip("0123456789"), int("0" + "".join(filter(str.isdigit, point)))
    {
        "construction": lambda: around(pipeline, "connect", kill),
        "step": lambda: within("step", number, kill),
        "cut": lambda: within("step", number, kill),
        "evaluation": lambda: within("eval_step", number, kill),
        "clip": lambda: around(pipeline.Pipeline, "clip_grad_norm_", kill),
        "save": lambda: around(checkpoint._Writer, "write_data", lambda: None, kill),
        "refresh": lambda: before_call(memory_checkpoint._Slots, "publish", number, kill),
        "close": lambda: around(pipeline, "_close", kill),
    }[name]()


def note_second_step(times: Path) -> None:
    """Append the time to a file when the second step has ended."""
    count = itertools.count(1)

    def ended() -> None:
        if next(count) == 2:
            with times.open("a") as file:
                file.write(f"{time.time()}\n")

    around(pipeline.Pipeline, "step", lambda: None, ended)


def main() -> None:
    notes, rank = Path(os.environ["NOTES"]), os.environ["RANK"]
    left = [kill for kill in os.environ["KILLS"].split(",") if not (notes / kill).exists()]
    if left and left[0].partition(":")[2] == rank:

        def kill() -> None:
            (notes / left[0]).write_text(str(time.time()))
            if left[0].startswith("cut"):
                return time.sleep(10)  # in which who reads the note takes the link down
            os.kill(os.getpid(), signal.SIGKILL)

        arm(left[0].partition(":")[0], kill)
    if rank == "0":
        note_second_step(Path(f"{notes}.steps"))
    if "TIMEOUT" in os.environ:
        pipeline.Pipeline.__init__.__kwdefaults__["timeout"] = float(os.environ["TIMEOUT"])
    sys.argv = sys.argv[1:]
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
