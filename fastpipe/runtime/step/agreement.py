"""The agreement on a step: what ranks report of it before it begins, and which differences they refuse."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import bytes_of, dtype_name, is_block_mask
from fastpipe.runtime.coordination import Replies, Reply, sharing_batch
from fastpipe.runtime.model import check_changes
from fastpipe.runtime.step.inputs import NAMED, PARTS, ROWS, RULE, Inputs, Request, input_names
from fastpipe.runtime.step.microbatch import rows_of_split

_SAMPLE = 4096


def call_text(request: Request) -> str:
    """Text that must be the same on every rank."""
    names = ", ".join(["", *sorted(request.kwargs)])
    call = "step" if request.training else "eval_step, or a step without a loss,"
    more = "" if request.gathers_outputs is False else ", gather_outputs"
    more += "" if request.reduces else ", under no_sync"
    more += ("" if request.traces is False else ", trace") + (
        "" if request.index is None else f", index={request.index}"
    )
    return f"{call} with num_microbatches={request.num_microbatches}{names}{more}"


def batch_digests(request: Request, inputs: Inputs, whole: bool) -> dict[str, list[Any]]:
    """The form and a checksum of the values of every argument of this rank, needed here or not.

    Args:
        inputs: the inputs taken from it. An iterator's items count on ranks that consumed them.
        whole: checksum all elements, also on a device, which waits for it. Otherwise some thousand elements of every
            CPU tensor, which takes microseconds.
    """
    given = dict(zip(input_names(len(request.args)), request.args, strict=True))
    given |= {name: inputs.kwargs.get(name, v) if isinstance(v, Iterator) else v for name, v in request.kwargs.items()}
    given |= {"target": request.target, "output_grad": request.output_grad}
    found = {}
    for name, value in given.items():
        if value is not None and not isinstance(value, Iterator):
            found[name] = [[type(value).__name__, *_form(value)], _digest(value, 0, whole)]
    return found


def _form(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        # a nested one has a symbol among its sizes
        return [dtype_name(value.dtype), *([] if value.is_nested else value.shape)]
    return [len(value)] if isinstance(value, list) else []


def _digest(value: Any, found: int, whole: bool) -> int:
    if type(value) in (tuple, list):
        for item in value:
            found = _digest(item, found, whole)
    elif type(value) is dict:
        found = _digest(list(value.values()), found, whole)
    elif type(value) in (bool, int, float, str):
        found = zlib.crc32(repr(value).encode(), found)
    elif type(value) in (torch.Tensor, nn.Parameter) and _is_read(value, whole):
        found = zlib.crc32(bytes_of(value if whole else _sampled(value)).numpy().data, found)
    elif is_block_mask(value):
        found = _digest(value.kv_num_blocks, found, whole)
    # other objects may have state that differs between ranks, such as a key-value cache
    return found


def _is_read(tensor: torch.Tensor, whole: bool) -> bool:
    is_dense = tensor.layout is torch.strided and not tensor.is_nested and not tensor.is_meta
    return is_dense and (whole or tensor.device.type == "cpu")


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    """At most some thousand elements, evenly spaced."""
    tensor, size = tensor.detach(), tensor.numel()
    if size <= _SAMPLE:
        return tensor
    stride = size // _SAMPLE | 1  # odd: an even stride would sample the same columns of every row
    if tensor.is_contiguous():
        return tensor.view(-1)[::stride]
    return tensor[torch.unravel_index(torch.arange(0, size, stride), tensor.shape)]


def check_calls(replies: Replies) -> None:
    """Refuse a step if ranks make different calls."""
    calls = [reply["call"] for reply in replies]
    if len(set(calls)) > 1:
        each = "; ".join(f"rank {rank}: {call}" for rank, call in enumerate(calls))
        raise ValueError(
            f"the ranks do not make the same call: {each}; make the same calls on every rank, with the same arguments, "
            "or None for one that a rank does not need"
        )
    for reply in replies.elsewhere:
        if reply["call"] != calls[0]:
            raise ValueError(
                f"the pipelines of the mesh do not make the same call, and their stages share collectives: here "
                f"{calls[0]}; at {reply['pipeline']}: {reply['call']}"
            )


def check_replies(request: Request, replies: Replies, here: str) -> None:
    """Refuse inputs that do not fit together. All pipelines of a mesh refuse those of one: their stages meet."""
    pipelines: dict[str, list[Reply]] = {here: [*replies]}
    for reply in replies.elsewhere:
        pipelines.setdefault(reply["pipeline"], []).append(reply)
    for own in pipelines.values():
        _check_pipeline(request, own)
    _check_autocast(replies)
    batches: dict[str, dict[str, Any]] = {}
    for place, reply in replies.by_place.items():
        batches.setdefault(sharing_batch(reply.get("pipeline", here)), {})[place] = reply.get("batch", {})
    for same in batches.values():
        check_batches(same)
    _check_peers(replies, here)


def _check_autocast(replies: Replies) -> None:
    first = replies[0]["autocast"]
    for place, reply in replies.by_place.items():
        if reply["autocast"] != first:
            raise ValueError(
                f"autocast is {first} on rank 0 and {reply['autocast']} on rank {place}: call step within the same "
                "torch.autocast on every rank (a layer may enter one of its own)"
            )


def _check_peers(replies: Replies, here: str) -> None:
    """Refuse steps in which the same rank of several pipelines of a mesh would run other collectives."""
    for number, theirs in enumerate(replies.elsewhere):
        rank = number % len(replies)
        own, pipeline = replies[rank], theirs["pipeline"]
        place = f"on rank {rank} of this pipeline and of that at {pipeline}, whose stages share collectives"
        if sharing_batch(pipeline) != sharing_batch(here):
            continue
        if own["flags"][0] == theirs["flags"][0] and own["flags"] != theirs["flags"]:
            raise ValueError(
                f"the modules' training, or the parameters' requires_grad or dtype differ {place}: call train(), "
                "eval(), requires_grad_() and to() alike on both"
            )
        if own["divisors"] != theirs["divisors"]:
            raise ValueError(
                f"loss_reduction gives other weights {place}: pass the same function on every rank, of the target alone"
            )


def _check_pipeline(request: Request, replies: Sequence[Reply]) -> None:
    whole = {name: rows for reply in replies for name, rows in reply["whole"].items()}
    _check_parts(whole, request.num_microbatches)
    if not any(reply["rows"] for reply in replies):
        _check_not_shared(whole, request.num_microbatches)
    check_splits(whole, request.num_microbatches)
    taken = {name for reply in replies for name in reply["kwargs"]}
    for name in request.kwargs:
        if name not in taken:
            raise ValueError(
                f"{name}: no stage's forward takes this keyword argument; leave it out (values for loss_fn are "
                "part of target=; of a model of transformers that was split, loss_fn=layers.loss_fn is the model's own "
                "loss, of target=labels)"
            )
    check_given([reply["kwargs"] for reply in replies])
    for name in set.intersection(*(set(reply["unknown"]) for reply in replies)):
        raise ValueError(
            f"split[{name!r}]: no stage's forward takes this keyword argument; use one that it takes, the "
            "position of an input, 'target' or 'output_grad'"
        )
    check_changes([reply["changes"] for reply in replies])


def check_batches(digests: Mapping[str, Mapping[str, list[Any]]]) -> None:
    """Refuse a step if ranks were given different batches.

    Args:
        digests: of every rank, from `batch_digests`, by its number, with its place in another pipeline of a mesh.
            Arguments of different types are not compared.
    """
    for name in sorted({name for own in digests.values() for name in own}):
        by_type: dict[str, dict[str, list[Any]]] = {}
        for rank, own in digests.items():
            if name in own:
                by_type.setdefault(own[name][0][0], {})[rank] = own[name]
        for found in by_type.values():
            first, *_ = found
            others = [rank for rank, own in found.items() if own != found[first]]
            if others:
                same_form = all(own[0] == found[first][0] for own in found.values())
                what = "other values" if same_form else "another dtype or shape"
                raise ValueError(
                    f"{name} has {what} on ranks [{', '.join(others)}] than on rank {first}: in every call of "
                    "step give all ranks of a pipeline the same batch, or None where a rank does not need it, and so "
                    "along other dimensions of a mesh (name one whose ranks have data of their own 'cp', 'ep' or a "
                    "name that begins with 'dp'). Shuffle by the same seed on all of them, give a DistributedSampler "
                    "the pipelines as its replicas, and let no rank leave out a call (see Loading data in "
                    "docs/guide.md)"
                )


def _check_parts(whole: Mapping[str, list[Any]], num_microbatches: int) -> None:
    """Refuse a whole batch with as many rows as the user's microbatches, or a multiple, that would be cut elsewhere."""
    parts_of = {name: found for name, (found, way) in whole.items() if way == PARTS}
    rows_by_name = {name: found for name, (found, way) in whole.items() if way != PARTS}
    for (name, parts), (other, rows) in itertools.product(parts_of.items(), rows_by_name.items()):
        own, total = list(rows_of_split(rows, num_microbatches)), sum(parts)
        if rows and rows % total == 0 and [part * rows for part in parts] != [part * total for part in own]:
            raise ValueError(
                f"{other} has {rows} rows, which are split into microbatches of {own}, and those of {name} have "
                f"{parts}: give both as lists of microbatches, both whole, or both a function in split="
            )


def _check_not_shared(whole: Mapping[str, list[Any]], num_microbatches: int) -> None:
    """Refuse a batch of a single row by keyword, which every microbatch would get."""
    shared = next((name for name, found in whole.items() if found == [1, NAMED]), None)
    if shared is not None and num_microbatches > 1:
        raise ValueError(
            f"{shared} has 1 row but num_microbatches = {num_microbatches}: give at least one row per microbatch, or "
            "fewer microbatches"
        )


def check_splits(whole: Mapping[str, list[Any]], num_microbatches: int) -> None:
    """Refuse arguments whose microbatches do not match.

    Args:
        whole: the rows of each, and how they are split: `ROWS`, `NAMED`, `RULE` or `PARTS`.

    Raises:
        ValueError: if an input without a rule does not have the batch's rows, or if rows are not in the same proportion
            in every microbatch.
    """
    if num_microbatches == 1:
        return
    rows = {name: found for name, (found, _) in whole.items()}
    batch = [name for way in (ROWS, NAMED) for name, found in whole.items() if found[1] == way and rows[name] != 1]
    for name in batch:
        if rows[name] != rows[batch[0]]:
            raise ValueError(
                f"{name} has {rows[name]} rows (dimension 0) but {batch[0]} has {rows[batch[0]]}: give as many, "
                f"or a rule for {name} in split=: 'replicate' to share it between all microbatches, a dimension, or a "
                "function"
            )
    cut = [name for name, found in whole.items() if name in batch or found[1] == RULE]
    first = batch[0] if batch else next(iter(cut), "")
    for name in cut:
        if rows[name] == rows[first]:
            continue
        own, others = (list(rows_of_split(count, num_microbatches)) for count in (rows[name], rows[first]))
        if any(mine * rows[first] != rows[name] * other for mine, other in zip(own, others, strict=True)):
            raise ValueError(
                f"{name} has {rows[name]} rows but {first} has {rows[first]}: microbatches of {own} rows do "
                f"not match microbatches of {others} rows; give batches of the same length, lists of microbatches, or "
                "split= with another dimension or 'replicate' for an input that is not a batch"
            )


def check_given(given: Sequence[Mapping[str, list[bool]]]) -> None:
    """Refuse a keyword argument that some stages get and others do not (`Inputs.given` of every rank)."""
    for name in sorted({name for own in given for name in own}):
        found = {rank: own[name] for rank, own in enumerate(given) if name in own}
        if len(set(map(tuple, found.values()))) > 1:
            without = [rank for rank, values in found.items() if not all(values)]
            others = [rank for rank in found if rank not in without]
            where = f"but not on ranks {others}" if others else "for different microbatches"
            raise ValueError(
                f"{name} is None on ranks {without} {where}; stages on all of these ranks take it, so pass the same "
                "value on each"
            )
