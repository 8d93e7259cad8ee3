"""Train a byte-level GPT over a pipeline, on the sources of the Python standard library.

    torchrun --standalone --nproc-per-node 4 examples/train_gpt.py     four processes, each one rank
    python examples/train_gpt.py                                       one process, whose threads are four ranks

Every rank runs the whole script, which does not depend on the rank: fastpipe uses the part of each batch that a rank
needs, and the console prints on one of them.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from console import Console
from gpt_model import Shape, continue_text, gpt_layers, loss_fn
from text_data import Bigram, Corpus, byte_frequencies, even_batches, random_batches, read_corpus
from torch import Tensor, nn
from training import DEVICES, Budget, Meter, learning_rate, own_device, positive, run

import fastpipe

Batch = tuple[Tensor, Tensor]

TRACE_EVERY = 25
PLAN_EFFORT, PLAN_ROUNDS = 0.2, 5
PROMPT = 'def read_file(path, encoding=None):\n    """'


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level GPT over a pipeline, on the sources of the Python standard library.",
        epilog="Under torchrun every process is one rank; started alone, one process runs all ranks as threads.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    processes = int(os.environ.get("WORLD_SIZE", "0"))
    schedules = ", ".join(family.name for family in fastpipe.list_schedules())
    pipeline = parser.add_argument_group("pipeline")
    pipeline.add_argument("--ranks", type=positive(int), default=processes or 4, help="how many ranks")
    pipeline.add_argument("--schedule", default="dualpipev", help=schedules)
    pipeline.add_argument("--microbatches", type=positive(int), default=8, help="into how many a step's batch is split")
    pipeline.add_argument("--executor", default="auto", choices=["auto", "native", "python"], help="what runs it")
    pipeline.add_argument("--device", default="auto", choices=DEVICES, help="a GPU a process, or the CPU")
    model = parser.add_argument_group("model")
    model.add_argument("--layers", type=positive(int), default=8, help="at least one per stage")
    model.add_argument("--width", type=positive(int), default=160, help="a multiple of 32")
    model.add_argument("--context", type=positive(int), default=128, help="how many bytes it sees at once")
    training = parser.add_argument_group("training")
    training.add_argument("--seconds", type=positive(float), default=150.0, help="how long to train")
    training.add_argument("--steps", type=positive(int), help="how long to train, in steps, not seconds")
    training.add_argument("--rows", type=positive(int), default=1, help="pieces of text in a microbatch")
    training.add_argument("--rate", type=positive(float), default=5e-3, help="the highest learning rate")
    training.add_argument("--clip", type=positive(float), default=1.0, help="the largest norm of all gradients")
    training.add_argument("--seed", type=int, default=0, help="of weights, batches and sample")
    training.add_argument("--sample", type=positive(int), default=320, help="how many bytes to write at the end")
    training.add_argument("--checkpoints", type=Path, help="folder to save into, and to resume from")
    training.add_argument("--save-every", type=positive(int), default=50, help="steps between saves, besides the last")
    training.add_argument("--memory-copies", type=positive(int), help="hosts with a copy of each step in memory")
    training.add_argument("--out", type=Path, default=Path("runs/train_gpt"), help="folder for the picture")
    return parser.parse_args()


@dataclass
class Session:
    """The model, the pipeline that trains it, and the texts."""

    model: nn.Sequential
    pipe: fastpipe.Pipeline
    corpus: Corpus
    validation: list[Batch]


def build(args: argparse.Namespace) -> Session:
    device = own_device(args.device)
    corpus = read_corpus().to(device)
    if args.context >= (size := min(len(corpus.training), len(corpus.validation))):
        raise ValueError(f"context = {args.context}: the texts have {size} bytes and more; give less")
    torch.manual_seed(args.seed)
    layers = gpt_layers(Shape(args.layers, args.width, args.context), byte_frequencies(corpus.training))
    model = nn.Sequential(*layers).to(device)
    pipe = fastpipe.Pipeline(
        model,
        schedule=args.schedule,
        num_ranks=args.ranks,
        num_microbatches=args.microbatches,
        loss_fn=loss_fn,
        executor=args.executor,
    )
    validation = even_batches(corpus.validation, count=8, rows=8 * args.microbatches, length=args.context)
    return Session(model, pipe, corpus, validation)


def introduce(session: Session, args: argparse.Namespace, console: Console) -> None:
    pipe, corpus = session.pipe, session.corpus
    parameters = sum(parameter.numel() for parameter in session.model.parameters())
    ranks = f"{args.ranks} pipeline rank{'s' if args.ranks > 1 else ''}"
    console.say(f"\nfastpipe {fastpipe.__version__} trains a byte-level GPT over {ranks}\n")
    console.fact(
        "text",
        f"{len(corpus.training) / 1e6:.1f} MB of the standard library of Python {platform.python_version()}; "
        f"{len(corpus.validation) / 1e6:.2f} MB of other files to validate",
    )
    console.fact("model", f"{parameters / 1e6:.1f} M parameters: {args.layers} layers of width {args.width}")
    console.fact(
        "pipeline",
        f"{args.schedule}, {pipe.num_stages} stages, {args.microbatches} microbatches of {args.rows} x {args.context} "
        "bytes",
    )
    console.fact("executor", f"{args.executor}, on {device_name(pipe.device)}; {fastpipe.native_status()}")


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "the CPU"


def check(session: Session, batch: Batch, console: Console) -> None:
    """One batch through the pipeline and through the unsplit model: on CPUs the same to the last bit."""
    console.fact("check", str(fastpipe.check_parity(session.pipe, session.model, batch)).removeprefix("parity: "))


def validate(session: Session) -> float:
    """Nats a byte on the validation text."""
    losses = [session.pipe.eval_step(inputs, target=targets).loss for inputs, targets in session.validation]
    return torch.stack(losses).mean().item()


def train(session: Session, args: argparse.Namespace, console: Console) -> None:
    pipe = session.pipe
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=args.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    batches = random_batches(session.corpus.training, args.rows * args.microbatches, args.context, args.seed)
    meter, budget = Meter(), Budget(args.steps, args.seconds)
    memory = fastpipe.MemoryCheckpoint(pipe, optimizer, keep=args.memory_copies) if args.memory_copies else None
    step = resume(session, optimizer, memory, args, budget, console)
    batches = itertools.islice(batches, step, None)
    spent = budget.spent(step)
    writing = None
    while spent < 1:
        optimizer.param_groups[0]["lr"] = learning_rate(args.rate, spent)
        inputs, targets = next(batches)
        traced = step % TRACE_EVERY == 0 or not meter.tokens
        optimizer.zero_grad()
        result = pipe.step(inputs, target=targets, trace=traced)
        pipe.clip_grad_norm_(args.clip)
        optimizer.step()
        step += 1
        spent = budget.spent(step)
        meter.update(result, inputs.numel(), traced)
        console.progress(meter.line(step, spent))
        extra = {"step": step, "seconds": budget.elapsed()}
        if memory is not None:
            memory.save(extra)
        if args.checkpoints and (step % args.save_every == 0 or spent == 1):
            path = args.checkpoints / f"step{step}"
            writing = fastpipe.save_checkpoint(path, pipe, optimizer, extra=extra, asynchronous=True, keep=2)
    if meter.tokens:  # else the checkpoint was that of the last step
        console.end_progress(meter.line(step, spent))
    if writing is not None:
        writing.result()  # raises if it could not be written
    if memory is not None:
        memory.close()


def resume(
    session: Session,
    optimizer: torch.optim.Optimizer,
    memory: fastpipe.MemoryCheckpoint | None,
    args: argparse.Namespace,
    budget: Budget,
    console: Console,
) -> int:
    """Load the newest checkpoint, if there is one, in memory or on disk; the step to go on with."""
    found = fastpipe.latest_checkpoint(args.checkpoints) if args.checkpoints else None
    if memory is not None:
        extra = memory.load(found)
    else:
        extra = fastpipe.load_checkpoint(found, session.pipe, optimizer) if found else None
    if extra is None:
        return 0
    budget.start -= extra["seconds"]
    console.fact("resumed", f"from {found}" if memory is None else f"after step {extra['step']}")
    return int(extra["step"])


def gather(session: Session) -> nn.Module:
    """The whole model with the trained weights of every rank, on the CPU; the pipeline trains no more."""
    session.model.cpu()
    if dist.is_initialized():
        states = [{}] * dist.get_world_size()
        dist.all_gather_object(states, session.pipe.state_dict())
        for state in states:
            session.model.load_state_dict(state, strict=False)
    return session.model


def taking_turns(num_ranks: int, device: torch.device) -> str | None:
    """What to say where ranks have no core or GPU each, which no prediction knows of."""
    if device.type == "cuda":
        count = min(torch.cuda.device_count(), dist.get_world_size() if dist.is_initialized() else 1)
        return f"{num_ranks} ranks take turns on {count} GPU{'s' * (count > 1)} here" if count < num_ranks else None
    cores = os.cpu_count() or 1
    return f"{num_ranks} ranks take turns on {cores} cores here" if cores < num_ranks else None


def report_bubble(session: Session, batch: Batch, args: argparse.Namespace, console: Console) -> None:
    """Trace one more step; compare it with what the simulator says of the schedule, and draw it."""
    measured = session.pipe.step(batch[0], target=batch[1], trace=True).timeline
    equal = fastpipe.simulate(session.pipe.schedule, fastpipe.CostModel())
    timed = fastpipe.simulate(session.pipe.schedule, fastpipe.CostModel.from_timeline(measured))
    text = (
        f"predicted {equal.bubble_fraction:.1%} if all stages cost the same, "
        f"{timed.bubble_fraction:.1%} with their measured times\nmeasured  {measured.bubble_fraction:.1%}"
    )
    if turns := taking_turns(args.ranks, session.pipe.device):
        text += f", much of it time-slicing: {turns}"
    console.fact("bubble", text)
    console.picture(measured, args.out / "timeline.png")


def report_plan(session: Session, batch: Batch, args: argparse.Namespace, console: Console) -> None:
    """Plan with the costs of this run, go on by the plan and back in turns, and say what that was to gain and gains."""
    pipe = session.pipe
    before, costs = pipe.schedule, pipe.profile(batch[0], target=batch[1])
    numbers = {"num_ranks": args.ranks, "num_microbatches": args.microbatches}
    plan = fastpipe.plan(costs, placement=before, effort=PLAN_EFFORT, **numbers)
    expected = fastpipe.simulate(before, costs).makespan
    seconds: dict[str, list[float]] = {"before": [], "planned": []}
    for _ in range(PLAN_ROUNDS):
        for name, schedule in (("before", before), ("planned", plan.schedule)):
            pipe.replan(schedule)
            pipe.step(batch[0], target=batch[1])  # the first one by an order announces shapes
            timeline = pipe.step(batch[0], target=batch[1], trace=True).timeline
            seconds[name].append(timeline.makespan)
    own = "GPU" if pipe.device.type == "cuda" else "core"
    old, new = (statistics.median(values) for values in seconds.values())
    text = (
        f"{plan.chosen.name}: predicted {1e3 * expected:.1f} -> {1e3 * plan.makespan:.1f} ms a step "
        f"({plan.makespan / expected - 1:+.1%}), if every rank has a {own}\n"
        f"measured  {1e3 * old:.1f} -> {1e3 * new:.1f} ms ({new / old - 1:+.1%}), the median of {PLAN_ROUNDS} in turns"
    )
    if turns := taking_turns(args.ranks, pipe.device):
        text += f"; {turns}, which fills the waiting that a plan saves"
    console.fact("plan", text)


def main() -> None:
    args = parse_arguments()
    console = Console()
    # One thread a rank, unless the user says otherwise: ranks share the cores.
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    session = build(args)
    introduce(session, args, console)
    batch = next(random_batches(session.corpus.training, args.rows * args.microbatches, args.context, args.seed))
    check(session, batch, console)
    bigram = Bigram(session.corpus.training).loss(session.validation)
    before = validate(session)
    console.fact("validation", f"{before:.3f} nats a byte before training")
    console.fact("bigram", f"{bigram:.3f} nats a byte, when each byte is guessed from the one before it")
    console.say()
    train(session, args, console)
    after = validate(session)
    against = f"{abs(bigram - after):.3f} {'under' if after < bigram else 'over'} the bigram model"
    console.fact("validation", f"{after:.3f} nats a byte after training, {against}")
    report_bubble(session, batch, args, console)
    report_plan(session, batch, args, console)
    model = gather(session)
    console.fact("sample", "the model goes on after three quotation marks")
    console.quote(lambda: continue_text(model, PROMPT, args.sample, args.context, args.seed))


if __name__ == "__main__":
    run(main)
