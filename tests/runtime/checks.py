"""What a pipelined step must equal: the unsplit model's, bit for bit."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fastpipe import Pipeline, StepResult
from fastpipe.runtime.stage.stage import Chain
from fastpipe.runtime.step.microbatch import merge
from fastpipe.schedule import Schedule
from fastpipe.testing import Reference, backward_order, reference_step
from tests.runtime.models import CASES, Batch, Case


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are the same to the last bit, the sign of zero and NaN included, wherever they are."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    left, right = (t.detach().cpu().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
    return torch.equal(left, right)


def unequal(pipe: Pipeline, unsplit: nn.Module) -> list[str]:
    """The local parameters whose gradients differ from the unsplit model's."""
    expected = dict(unsplit.named_parameters())
    return [name for name, p in pipe.named_parameters() if not _same_grad(p.grad, expected[name].grad)]


def _same_grad(found: torch.Tensor | None, expected: torch.Tensor | None) -> bool:
    """No gradient and one of zeros are the same: a stage sends zeros for what the next one did not use."""
    if found is None or expected is None:
        return all(grad is None or not grad.any() for grad in (found, expected))
    return same_bits(found, expected)


def assert_same(pipe: Pipeline, result: StepResult, unsplit: nn.Module, reference: Reference) -> None:
    """Losses, outputs and gradients are the reference's."""
    assert result.loss is not None and same_bits(result.loss, reference.loss), (result.loss, reference.loss)
    assert result.losses is not None and len(result.losses) == len(reference.losses)
    assert all(map(same_bits, result.losses, reference.losses))
    if pipe.is_last:
        local = [reference.outputs[i] for i in outputs_here(pipe)]
        found, expected = tensors_in([result.outputs]), tensors_in([merge(local, None)])
        assert len(found) == len(expected) and all(map(same_bits, found, expected)), "the outputs differ"
    assert_same_reports(result, reference)
    assert not (wrong := unequal(pipe, unsplit)), f"the gradients of {wrong} differ"


def assert_same_reports(result: StepResult, reference: Reference) -> None:
    """Metrics and added losses are the reference's."""
    for found, expected in ((result.metrics, reference.metrics), (result.added_losses, reference.added_losses)):
        assert found.keys() == expected.keys()
        for name in found:
            pair = tensors_in([found[name]]), tensors_in([expected[name]])
            assert pair[1] and all(map(same_bits, *pair)), (name, found[name], expected[name])


def outputs_here(pipe: Pipeline) -> list[int]:
    """The microbatches whose outputs are on this process: all, or one route's where ranks are processes."""
    placement, count = pipe.schedule.placement, pipe.schedule.num_microbatches
    last = [placement.routes[placement.route_of(i, count)][-1] for i in range(count)]
    return [i for i in range(count) if last[i] in pipe._local.by_rank]


def reference_of(unsplit: nn.Module, batch: Batch, pipe: Pipeline, case: Case, **options: Any) -> Reference:
    """The unsplit model's step on the same batch."""
    pair = (batch.args, batch.target)
    return reference_step(
        unsplit, pair, pipe.schedule, loss_fn=case.loss_fn, split_rules=case.split, kwargs=batch.kwargs, **options
    )


def rows_for(num_microbatches: int) -> int:
    """Rows that do not divide evenly."""
    return 2 * num_microbatches + 1


@dataclass(frozen=True)
class Unsplit:
    """Steps of an unsplit model, which accumulate. They are computed once for all pipelines that must equal them.

    Attributes:
        model: which has the gradients of the step that was looked at last.
        references: what each step gave.
        grads: of the parameters, after each step.
        input_grads: of the tensors in each batch's arguments.
    """

    model: Chain
    references: list[Reference]
    grads: list[list[torch.Tensor | None]]
    input_grads: list[list[torch.Tensor | None]]

    def __iter__(self) -> Iterator[tuple[Reference, list[torch.Tensor | None]]]:
        for reference, grads, input_grads in zip(self.references, self.grads, self.input_grads, strict=True):
            for parameter, grad in zip(self.model.parameters(), grads, strict=True):
                parameter.grad = grad
            yield reference, input_grads


_unsplit: dict[tuple[Any, ...], Unsplit] = {}


def unsplit_steps(name: str, num_layers: int, steps: int, schedule: Schedule) -> Unsplit:
    """Those that belong to a schedule: of it they know the microbatches, their order, and the routes they take.

    Convolutions may sum in another order with another number of threads.
    """
    count, case = schedule.num_microbatches, CASES[name]
    routes = tuple(schedule.placement.route_of(i, count) for i in range(count))
    key = (name, num_layers, steps, count, tuple(backward_order(schedule)), routes, torch.get_num_threads())
    if key not in _unsplit:
        made = Unsplit(Chain(dict(enumerate(case.layers(num_layers)))), [], [], [])
        for batch in case.batches(steps, rows_for(count)):
            pair = (batch.args, batch.target)
            options: Any = {"loss_fn": case.loss_fn, "split_rules": case.split, "kwargs": batch.kwargs}
            made.references.append(reference_step(made.model, pair, schedule, **options))
            made.grads.append([None if p.grad is None else p.grad.clone() for p in made.model.parameters()])
            made.input_grads.append([tensor.grad for tensor in tensors_in(batch.args)])
        _unsplit[key] = made
    return _unsplit[key]


def train_and_compare(
    name: str, schedule: str, num_microbatches: int, *, steps: int = 3, num_layers: int | None = None, **options: Any
) -> Pipeline:
    """Steps that accumulate, each compared with the unsplit model's: the first announces shapes, the others know."""
    case = CASES[name]
    ranks = options.get("num_ranks") or torch.distributed.get_world_size()
    count = 2 * ranks * max(2, options.get("stages_per_rank") or 0) + 1 if num_layers is None else num_layers
    pipe = Pipeline(case.layers(count), schedule, num_microbatches, case.loss_fn, split=case.split, **options)
    unsplit = unsplit_steps(name, count, steps, pipe.schedule)
    for batch, (reference, input_grads) in zip(case.batches(steps, rows_for(num_microbatches)), unsplit, strict=True):
        result = pipe.step(*batch.args, target=batch.target, **batch.kwargs)
        assert_same(pipe, result, unsplit.model, reference)
        assert_same_input_grads(pipe, batch, input_grads)
    return pipe


def assert_same_input_grads(pipe: Pipeline, batch: Batch, expected: Iterable[torch.Tensor | None]) -> None:
    """An input that requires a gradient gets it, on the rank that has the first stage."""
    for found, grad in zip(tensors_in(batch.args), expected, strict=True):
        if grad is not None and pipe.is_first:
            assert found.grad is not None and same_bits(found.grad, grad)


def tensors_in(values: Iterable[Any] | Sequence[Any]) -> list[torch.Tensor]:
    """All tensors of a tree."""
    return [leaf for leaf in pytree.tree_leaves(list(values)) if isinstance(leaf, torch.Tensor)]
