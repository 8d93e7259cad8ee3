"""What copies in memory cost, and when training goes on after a kill: ``python benchmarks/memory_checkpoint.py``.

The model of `examples/train_gpt.py`, a whole step each: the pipeline, clipping, AdamW, and with `MemoryCheckpoint` a
save. Once all ranks are on one host, once each takes the others to be on another host (``FASTPIPE_HOST``), so that
channels and copies go over Gloo. A measurement ends when the last copy has reached the other host. Then torchrun trains
the same, a rank is killed, and the time until the next step has ended is taken, in which all processes start and import
torch. The processor's time of the saves of all ranks together, and its share of the steps', depends less on what else
the machine does; it leaves out what is sent and received in the background.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from gpt_model import Shape, gpt_layers, loss_fn
from ranks import Ranks, interleaved, ranks
from tables import machine, parser, ratio, spread, table
from text_data import byte_frequencies, random_batches, read_corpus

import fastpipe

ROWS, CONTEXT = 8, 128


def make_pipeline(layers: int, width: int) -> tuple[fastpipe.Pipeline, torch.optim.Optimizer, Callable[[], None]]:
    """The pipeline, its optimizer, and a step."""
    text = read_corpus().training
    torch.manual_seed(0)
    model = gpt_layers(Shape(layers, width, CONTEXT), byte_frequencies(text))
    pipe = fastpipe.Pipeline(model, "dualpipev", num_microbatches=8, loss_fn=loss_fn)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=1e-3, fused=True)
    batches = random_batches(text, ROWS, CONTEXT, seed=1)

    def step() -> None:
        inputs, targets = next(batches)
        optimizer.zero_grad()
        pipe.step(inputs, target=targets)
        pipe.clip_grad_norm_(1.0)
        optimizer.step()

    return pipe, optimizer, step


def make_tasks(hosts: int, options: Any, rank: int) -> dict[str, Callable[[], Any]]:
    if hosts > 1:
        os.environ["FASTPIPE_HOST"] = f"host{rank}"
    pipe, optimizer, step = make_pipeline(options.layers, options.width)
    tasks: dict[str, Callable[[], Any]] = {"without": partial(train, step, options.steps)}
    for keep in range(1, min(hosts, 2) + 1):
        memory = fastpipe.MemoryCheckpoint(pipe, optimizer, keep=keep, name=f"benchmark {os.getppid()} {keep}")
        tasks |= {f"keep={keep}": partial(train, step, options.steps, memory), f"close {keep}": memory.close}
    return tasks | {"bytes": lambda: 12 * sum(parameter.numel() for parameter in pipe.parameters())}


def train(step: Callable[[], None], steps: int, memory: fastpipe.MemoryCheckpoint | None = None) -> tuple[float, float]:
    """Some steps; the processor's seconds of this process for each, and those of the saves."""
    start, saves = time.process_time(), 0.0
    for number in range(steps):
        step()
        if memory is not None:
            before = time.process_time()
            memory.save({"step": number})
            saves += time.process_time() - before
    if memory is not None:
        memory._finish()
    return (time.process_time() - start) / steps, saves / steps


def measure(hosts: int, options: Any) -> list[list[str]]:
    """Rows of the table."""
    make = partial(make_tasks, hosts, options)
    with ranks(options.ranks, make, pin=options.pin) as group:
        ways = ["without", *(f"keep={keep}" for keep in range(1, min(hosts, 2) + 1))]
        measures = {way: partial(group.time, way) for way in ways}
        found = interleaved(measures, options.rounds, f"{hosts} hosts")
        used = {way: [processor(group, way) for _ in range(options.rounds)] for way in ways}
        for way in ways[1:]:
            group.call(f"close {way[-1]}")
        megabytes = max(group.call("bytes")) / 1e6
    place = "one host" if hosts == 1 else "a host for each rank"
    return [
        [
            f"{place}, {way}",
            f"{megabytes:.1f}",
            spread(found[way], 1e3 / options.steps),
            ratio(found[way], found["without"], 3),
            spread([saves for _, saves in used[way]], 1e3),
            spread([saves / (all_ - saves) for all_, saves in used[way]], 100),
        ]
        for way in ways
    ]


def processor(group: Ranks, way: str) -> tuple[float, float]:
    """The processor's seconds of a step and of its save, over all ranks."""
    found = group.call(way)
    return sum(step for step, _ in found), sum(saves for _, saves in found)


def work(folder: Path, layers: int, width: int) -> None:
    """A rank of the training that is disturbed."""
    pipe, optimizer, step = make_pipeline(layers, width)
    memory = fastpipe.MemoryCheckpoint(pipe, optimizer)
    number = (memory.load() or {"step": 0})["step"]
    (folder / f"pid{pipe.rank}").write_text(str(os.getpid()))
    while not (folder / "end").exists() or number < int((folder / "end").read_text()):
        step()
        number += 1
        memory.save({"step": number})
        if pipe.rank == 0:
            with (folder / "steps").open("a") as file:
                file.write(f"{number} {time.time()}\n")
    memory.close()


def steps_in(folder: Path) -> list[tuple[int, float]]:
    text = (folder / "steps").read_text() if (folder / "steps").exists() else ""
    return [(int(line.split()[0]), float(line.split()[1])) for line in text.splitlines()]


def restart(options: Any) -> str:
    """Kill the last rank in the midst of training, and wait for the next step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        agent = ["--standalone", "--nproc-per-node", str(options.ranks), "--max-restarts", "1"]
        script = [__file__, "--worker", name, "--layers", str(options.layers), "--width", str(options.width)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", *agent, *script]
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
        try:
            while len(before := steps_in(folder)) < 5 and process.poll() is None:
                time.sleep(0.01)
            killed = time.time()
            os.kill(int((folder / f"pid{options.ranks - 1}").read_text()), signal.SIGKILL)
            time.sleep(1)  # a step that was under way may end
            before = steps_in(folder)
            while len(after := steps_in(folder)[len(before) :]) < 1 and process.poll() is None:
                time.sleep(0.01)
            assert process.poll() is None, (folder / "log").read_text()
            draft = folder / "draft"
            draft.write_text(str(steps_in(folder)[-1][0] + 20))  # later than any rank is by now
            draft.rename(folder / "end")
            process.wait()
        finally:
            process.terminate()
    return (
        f"killed after step {before[-1][0]}; step {after[0][0]} had ended {after[0][1] - killed:.1f} s later, of "
        f"which importing torch and fastpipe took {importing():.1f} s alone"
    )


def importing() -> float:
    start = time.monotonic()
    subprocess.run([sys.executable, "-c", "import torch, fastpipe.runtime.memory_checkpoint"], check=True)
    return time.monotonic() - start


def main() -> None:
    options = parser(__doc__, rounds=15)
    options.add_argument("--ranks", type=int, default=4)
    options.add_argument("--layers", type=int, default=8)
    options.add_argument("--width", type=int, default=160)
    options.add_argument("--steps", type=int, default=4, help="of a measurement (4)")
    options.add_argument("--worker", type=Path, help="for torchrun: a rank of the training that is disturbed")
    chosen = options.parse_args()
    torch.set_num_threads(1)
    if chosen.worker:
        return work(chosen.worker, chosen.layers, chosen.width)
    print(machine())
    print(f"{chosen.ranks} ranks, {chosen.layers} layers of width {chosen.width}, {chosen.rounds} rounds\n")
    rows = measure(1, chosen) + measure(chosen.ranks, chosen)
    heads = ["", "state of a rank, MB", "step, ms", "to without", "processor: saves, ms", "% of the rest"]
    print(table(heads, rows, markdown=chosen.markdown))
    print(f"\n{restart(chosen)}")


if __name__ == "__main__":
    main()
