"""Train a small mixture of experts: two pipeline ranks, and the experts of each distributed over two processes.

    torchrun --standalone --nproc-per-node 4 examples/moe.py          DualPipeV, all-to-alls under the other direction
    torchrun --standalone --nproc-per-node 4 examples/moe.py --plain  the same without: the losses are the same
    python examples/moe.py                                            one process: two threads with all experts

Every pipeline of two ranks has its own half of each batch. Rows of tokens are sent to the process of their expert.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from moe_model import BALANCE, CONTEXT, NUM_EXPERTS, OverlappedPart, Part
from text_data import random_batches, read_corpus
from torch import Tensor, nn
from training import positive, replicas_by_ranks, run

import fastpipe

NUM_RANKS, MICROBATCHES, ROWS, MAX_NORM = 2, 8, 32, 0.5


def loss_fn(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def share_gradients(pipe: fastpipe.Pipeline, group: dist.ProcessGroup) -> None:
    """The loss is the mean of both halves of the batch: gradients of what both have are averaged.

    An expert's gradient has come from the rows of both halves already, and is divided alone.
    """
    named = [(name, p.grad) for name, p in pipe.named_parameters() if p.grad is not None]
    dense = [grad for name, grad in named if ".experts." not in name]
    flat = torch.cat([grad.flatten() for grad in dense])
    dist.all_reduce(flat, group=group)
    for grad, summed in zip(dense, flat.split([grad.numel() for grad in dense]), strict=True):
        grad.copy_(summed.view_as(grad))
    for _, grad in named:
        grad /= group.size()


def clip_gradients(pipe: fastpipe.Pipeline, group: dist.ProcessGroup | None) -> Tensor:
    """Clip by the norm of the whole model, in which what both halves have counts once, and so does every expert.

    A pipeline knows the experts of its own processes alone. By that norm each half would clip what both have otherwise,
    and their weights would drift apart.
    """
    if group is None:
        return pipe.clip_grad_norm_(MAX_NORM)
    own = pipe.clip_grad_norm_(math.inf)  # measures
    experts = [(p, p.grad) for name, p in pipe.named_parameters() if ".experts." in name]
    for p, _ in experts:
        p.grad = None
    dense = pipe.clip_grad_norm_(math.inf)
    for p, grad in experts:
        p.grad = grad
    squares = own**2 - dense**2
    dist.all_reduce(squares, group=group)
    norm = (squares + dense**2).sqrt()
    torch.nn.utils.clip_grads_with_norm_(pipe.parameters(), MAX_NORM, norm)
    return norm


def train(num_steps: int, schedule: str, kind: type[Part]) -> list[float]:
    """The losses."""
    mesh = replicas_by_ranks("ep", NUM_RANKS)
    experts_group, ranks_group = (None if mesh is None else mesh[name].get_group() for name in ("ep", "pp"))
    half = 0 if experts_group is None else experts_group.rank()
    num_halves = 1 if experts_group is None else experts_group.size()

    pipe = fastpipe.Pipeline(
        lambda index: kind(index, num_stages(schedule), experts_group),
        schedule,
        MICROBATCHES,
        loss_fn,
        num_ranks=NUM_RANKS,
        group=ranks_group,
        merge=False,
        overlap="never",  # no helper threads: processes must come to their all-to-alls in one order
    )
    speaks = pipe.rank == 0 and half == 0
    if speaks:
        held = f"{NUM_EXPERTS} experts in each, {NUM_EXPERTS // num_halves} a process"
        print(f"{schedule}: {NUM_RANKS} ranks, {pipe.num_stages} stages, {held}", flush=True)
    optimizer = torch.optim.AdamW(pipe.parameters(), lr=3e-3)
    batches = random_batches(read_corpus().training, ROWS, CONTEXT, seed=0)
    losses = []
    for step in range(num_steps):
        # of every microbatch a part, so that each has the same rows however many processes there are
        x, target = (part.unflatten(0, (MICROBATCHES, num_halves, -1))[:, half].flatten(0, 1) for part in next(batches))
        start = time.perf_counter()
        optimizer.zero_grad()
        result = pipe.step(x, target=target)
        found = torch.stack([result.loss, result.added_losses["balance"] / (BALANCE * pipe.num_stages)])
        if experts_group is not None:
            share_gradients(pipe, experts_group)
            dist.all_reduce(found, group=experts_group)
            found /= num_halves
        norm = clip_gradients(pipe, experts_group)
        optimizer.step()
        losses.append(float(found[0]))
        if speaks:
            took = 1000 * (time.perf_counter() - start)
            shown = f"loss {found[0]:.6f}  norm {norm:.3f}  imbalance {found[1]:.4f}"
            print(f"step {step:3}  {shown}  {took:5.0f} ms", flush=True)
    links = [module.link for module in pipe.stage_modules.values()]
    flights, covered = sum(link.num_flights for link in links), sum(link.num_covered for link in links)
    if speaks:
        print(f"all-to-alls of this process: {flights}, of which {covered} crossed beside the other direction's work")
    return losses


def num_stages(schedule: str) -> int:
    """How many stages a schedule has on these ranks."""
    return fastpipe.make_schedule(schedule, num_ranks=NUM_RANKS, num_microbatches=MICROBATCHES).num_stages


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """The command."""
    parser = argparse.ArgumentParser(description="Train a small mixture of experts.")
    parser.add_argument("--schedule", default="dualpipev", help="how the stages are run")
    parser.add_argument("--steps", type=positive(int), default=10, help="how many optimizer steps")
    parser.add_argument("--plain", action="store_true", help="nothing crosses beside other work")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return train(given.steps, given.schedule, Part if given.plain else OverlappedPart)


if __name__ == "__main__":
    run(main)
