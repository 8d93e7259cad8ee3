"""A mixture of experts whose all-to-alls overlap with a microbatch of the other direction, as in DualPipe.

Experts are distributed over processes: a token's row is sent to the process of its expert, and back. A block's forward
is therefore a generator, which yields while rows are in transit. The backward of an all-to-all is one too, and resumes
other work before it waits. `OverlappedPart.overlapped_forward_backward` combines the two: the forward of one microbatch
runs, piece by piece, inside the backward of another.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import fastpipe

VOCABULARY, WIDTH, HEADS, CONTEXT, HIDDEN = 256, 64, 4, 32, 128
NUM_EXPERTS, CHOSEN, BALANCE = 8, 2, 0.01


class Link:
    """The way to the processes that have the other experts.

    Args:
        group: those processes; None where this one has all experts.

    Attributes:
        beside: what may work while rows are under way; None where nobody can.
        num_flights: how many times rows were sent.
        num_covered: how many of these while the other direction had work to do.
    """

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.rank, self.size = (0, 1) if group is None else (group.rank(), group.size())
        self.beside: Pieces | None = None
        self.paired = False
        self.num_flights = self.num_covered = 0

    def counts(self, own: Tensor) -> Tensor:
        """How many rows every process has for each expert: [processes, experts]."""
        if self.group is None:
            return own[None]
        found = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(found, own, group=self.group)
        return torch.stack(found)

    def meanwhile(self) -> None:
        """Rows are under way: let the other direction go on until its own are."""
        if self.beside is not None:
            with torch.enable_grad():
                self.beside.advance()


class Flight:
    """Rows on their way to other processes.

    Args:
        rows: [rows, width], those for the first process first.
        sent: how many go to each process.
        received: how many come from each.
        link: the way there.
    """

    def __init__(self, rows: Tensor, sent: list[int], received: list[int], link: Link) -> None:
        self.sent, self.received, self.link = sent, received, link
        self.rows = rows.detach().contiguous()
        self.landed = rows.new_empty(sum(received), rows.shape[1])
        link.num_flights += 1
        link.num_covered += link.paired
        self.work: Any = None
        if link.group is None:
            self.landed.copy_(self.rows)
        else:
            self.work = dist.all_to_all_single(self.landed, self.rows, received, sent, group=link.group, async_op=True)

    def wait(self) -> Tensor:
        """The rows that came."""
        if self.work is not None:
            self.work.wait()
        return self.landed


class _Land(torch.autograd.Function):
    """Rows have come; in the backward their gradients go the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight.sent, flight.received, flight.link
        return flight.wait()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        sent, received, link = ctx.flight
        back = Flight(grads[0], received, sent, link)
        link.meanwhile()
        return back.wait(), None


class Pieces:
    """A forward that is done piece by piece.

    Args:
        generator: pauses when rows are under way, and returns the output and the loss of the router.
    """

    def __init__(self, generator: Generator[None, None, tuple[Tensor, Tensor]]) -> None:
        self.generator = generator
        self.output: Tensor | None = None
        self.balance: Tensor | None = None

    def advance(self) -> None:
        """One piece, if there is one left."""
        if self.output is None:
            try:
                next(self.generator)
            except StopIteration as end:
                self.output, self.balance = end.value

    def finish(self) -> Tensor:
        """All that is left."""
        while self.output is None:
            self.advance()
        # not in a piece: what is added within the backward of a function is taken to be recomputed
        fastpipe.add_loss(BALANCE * self.balance, "balance")
        return self.output


class Experts(nn.Module):
    """The experts of this process, each a small perceptron."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(number)
        )

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The rows come by process, and within a process by expert; `counts` says how many."""
        expert = torch.arange(counts.shape[1]).repeat(len(counts)).repeat_interleave(counts.flatten())
        order = expert.argsort(stable=True)
        parts = rows[order].split(counts.sum(dim=0).tolist())
        results = torch.cat([one(part) for one, part in zip(self.each, parts, strict=True)])
        return results[order.argsort()]


class Part(nn.Module):
    """One stage: attention, then experts. The first one has the embedding, too, and the last one the head.

    Args:
        index: which stage.
        num_stages: of how many.
        group: the processes that share the experts; None for this one alone.
    """

    def __init__(self, index: int, num_stages: int, group: dist.ProcessGroup | None) -> None:
        super().__init__()
        torch.manual_seed(index)
        self.link = Link(group)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH) if index == 0 else None
        self.position = nn.Parameter(torch.randn(CONTEXT, WIDTH) * 0.02) if index == 0 else None
        self.norm, self.expert_norm = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.project = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, NUM_EXPERTS, bias=False)
        self.head = nn.Linear(WIDTH, VOCABULARY) if index == num_stages - 1 else None
        # all are made everywhere, so that the numbers are the same, and those of this process are kept
        every = Experts(NUM_EXPERTS).each
        count = NUM_EXPERTS // self.link.size
        self.experts = Experts(0)
        self.experts.each.extend(every[self.link.rank * count : (self.link.rank + 1) * count])

    def forward(self, x: Tensor) -> Tensor:
        return Pieces(self.pieces(x)).finish()

    def pieces(self, x: Tensor) -> Generator[None, None, tuple[Tensor, Tensor]]:
        """The forward, which pauses when rows are under way.

        The router's loss is 1 if all experts are chosen equally often, and more otherwise.
        """
        if self.embedding is not None:
            x = self.embedding(x) + self.position
        x = x + self._attend(self.norm(x))
        tokens = self.expert_norm(x).flatten(0, 1)
        likely = self.router(tokens).softmax(dim=1)
        weights, chosen = likely.topk(CHOSEN, dim=1)
        order = chosen.flatten().argsort(stable=True)
        own = torch.bincount(chosen.flatten(), minlength=NUM_EXPERTS)
        every = self.link.counts(own)
        counts = every.view(self.link.size, self.link.size, -1)[:, self.link.rank]
        sent, received = own.view(self.link.size, -1).sum(dim=1).tolist(), counts.sum(dim=1).tolist()
        balance = NUM_EXPERTS * (every.sum(dim=0) / every.sum() * likely.mean(dim=0)).sum()

        rows = tokens[order // CHOSEN]
        flight = Flight(rows, sent, received, self.link)
        yield
        rows = self.experts(_Land.apply(rows, flight), counts)
        flight = Flight(rows, received, sent, self.link)
        yield
        rows = _Land.apply(rows, flight)[order.argsort()].view(*chosen.shape, WIDTH)
        x = x + (rows * weights[:, :, None]).sum(dim=1).view_as(x)
        return x if self.head is None else self.head(x), balance

    def _attend(self, x: Tensor) -> Tensor:
        rows, length, _ = x.shape
        query, key, value = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.project(mixed.transpose(1, 2).flatten(2))


class OverlappedPart(Part):
    """A part that knows how to do a forward and a backward at once."""

    @classmethod
    def overlapped_forward_backward(
        cls,
        module0: Part,
        inputs0: list[Tensor],
        criterion0: Callable[..., Tensor] | None,
        labels0: list[Tensor],
        module1: Part,
        loss1: Tensor | None,
        outputs1: list[Tensor],
        output_grads1: list[Tensor],
    ) -> tuple[list[Tensor], Tensor | None]:
        """The forward of `module0` in the pauses of the backward of `module1`, and the other way round.

        The backward sends gradients back to the experts: meanwhile the forward attends, and sends its rows to them.
        While these are under way the backward goes through its experts and sends what comes out; meanwhile the
        forward goes through its own experts; and so on.
        """
        forward = Pieces(module0.pieces(*inputs0))
        module1.link.beside = forward
        module0.link.paired = module1.link.paired = True
        try:
            roots: Sequence[Tensor] = outputs1 if loss1 is None else [loss1]
            torch.autograd.backward(roots, None if loss1 is not None else output_grads1)
            outputs0 = [forward.finish()]
        finally:
            module1.link.beside = None
            module0.link.paired = module1.link.paired = False
        return outputs0, None if criterion0 is None else criterion0(*outputs0, *labels0)
