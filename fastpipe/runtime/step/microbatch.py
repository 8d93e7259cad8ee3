"""Microbatches: splitting a step's inputs, counting their rows, merging its outputs."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, TypeGuard

import torch
from torch.nn.utils.rnn import PackedSequence

from fastpipe.runtime.common import is_block_mask, pytree, tensor_leaves

Rule = int | str | Callable[..., Any]
"""A dimension, ``"replicate"``, or a function."""

Rules = Rule | Mapping[str | int, Rule] | None
"""One rule for all, or one per argument by name, position or ``"target"``; default: dimension 0."""

REPLICATE = "replicate"


def rule_for(rules: Rules, key: str | int) -> Rule:
    """The rule of one argument or output."""
    if isinstance(rules, Mapping):
        return rules.get(key, 0)
    return 0 if rules is None else rules


def has_rule(rules: Rules, key: str | int) -> bool:
    """Whether the user gave a rule for this argument."""
    return key in rules if isinstance(rules, Mapping) else rules is not None


def check_split_and_merge(splitting: Any, merging: Any) -> None:
    """Refuse invalid rules."""
    for name, rules in (("split", splitting), ("merge", merging)):
        named = rules if isinstance(rules, Mapping) else {None: rules}
        for key, rule in named.items():
            where = name if key is None else f"{name}[{key!r}]"
            is_function = callable(rule) and not isinstance(rule, type)
            if not (rules is None or rule == REPLICATE or is_function or _is_whole(rule)):
                more = ", for all or in a dict by name or position" if key is None else ""
                raise ValueError(f"{where} = {rule!r}: give a dimension, {REPLICATE!r} or a function{more}")
            if not (key is None or isinstance(key, str) or (_is_whole(key) and key >= 0)):
                raise ValueError(f"{where}: give a name, or a position counted from 0")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def is_list_of_microbatches(value: Any, rule: Rule = 0) -> bool:
    """Whether a value has one item per microbatch: an iterator, or a list that is not passed to all of them."""
    return isinstance(value, Iterator) or (isinstance(value, list) and rule != REPLICATE)


_BATCH = (0, "target", "output_grad")
"""The arguments that are the batch; of others a tensor of one row is shared by all microbatches, as it broadcasts."""


def split(value: Any, num_microbatches: int, rules: Rules, key: str | int, name: str = "") -> list[Any]:
    """The microbatches of one argument.

    Args:
        value: a tensor or a tree of tensors (split along a dimension; the first microbatches get the extra rows), a
            list (one entry per microbatch, unless it is replicated), or an iterator (one item per microbatch). A
            BlockMask of FlexAttention is split along its batch; all share one of a single row.
        rules: a dimension, ``"replicate"``, or ``function(value, num_microbatches) -> sequence``, or a dict of them.
        key: of the argument in the rules: its name or position.
        name: in errors; default: the key.

    Raises:
        ValueError: for a list of another length, an iterator that ends early, or fewer rows than microbatches.
    """
    rule, name = rule_for(rules, key), name or str(key)
    shares_single_rows = key not in _BATCH and not has_rule(rules, key)
    if callable(rule):
        found = rule(value, num_microbatches)
        if not isinstance(found, Iterable):
            raise ValueError(f"split[{key!r}] returned a {type(found).__name__}: return the list of the microbatches")
        return _checked_list(list(found), num_microbatches, f"split[{key!r}]")
    if isinstance(value, Iterator):
        return _checked_list(list(islice(value, num_microbatches)), num_microbatches, f"{name} (an iterator)")
    if is_list_of_microbatches(value, rule):
        return _checked_list(value, num_microbatches, name)
    if rule == REPLICATE:
        return [value] * num_microbatches
    if not _is_whole(rule):
        raise ValueError(f"split[{key!r}] = {rule!r}: give a dimension, 'replicate' or a function")
    if isinstance(value, torch.Tensor):
        return list(_split_leaf(value, num_microbatches, rule, name, key, shares_single_rows))
    leaves, structure = pytree.tree_flatten(value, is_leaf=_is_one_value)
    parts = [_split_leaf(leaf, num_microbatches, rule, name, key, shares_single_rows) for leaf in leaves]
    return [pytree.tree_unflatten([part[i] for part in parts], structure) for i in range(num_microbatches)]


def _is_one_value(value: Any) -> bool:
    """Whether pytree would take it apart into tensors that do not all have the rows of the batch."""
    return is_block_mask(value) or isinstance(value, PackedSequence)


def _checked_list(values: list[Any], num_microbatches: int, name: str) -> list[Any]:
    if len(values) != num_microbatches:
        or_pass = f", or num_microbatches={len(values)} to this call if the schedule allows it" if values else ""
        raise ValueError(
            f"{name} has {len(values)} microbatches but num_microbatches = {num_microbatches}: pass as many{or_pass}"
        )
    return values


def check_has_shape(tensor: torch.Tensor) -> None:
    """Refuse torch's first kind of nested tensors, whose shape cannot be read."""
    if tensor.is_nested and tensor.layout is torch.strided:
        raise ValueError(
            "step was given a nested tensor of layout torch.strided, which has no shape: make it with "
            "layout=torch.jagged"
        )


def _split_leaf(
    leaf: Any, num_microbatches: int, dim: int, name: str, key: str | int, shares_single_rows: bool
) -> Sequence[Any]:
    if is_block_mask(leaf):
        return _split_block_mask(leaf, num_microbatches, dim, name, key)
    if not isinstance(leaf, torch.Tensor):
        is_whole = num_microbatches == 1 and isinstance(leaf, PackedSequence)
        if isinstance(leaf, str | bytes | int | float | bool) or leaf is None or is_whole:
            return [leaf] * num_microbatches
        raise ValueError(
            f"{name} is a {type(leaf).__name__}: give a tensor (a whole batch), a list or an iterator of microbatches, "
            f"or say how to split it with split={{{key!r}: function}}, or 'replicate' for the same in all microbatches"
        )
    check_has_shape(leaf)
    if shares_single_rows and (leaf.dim() == 0 or leaf.shape[0] == 1):
        return [leaf] * num_microbatches
    if leaf.layout is not torch.strided:
        dense = "to_padded_tensor" if leaf.is_nested else "to_dense"
        raise ValueError(
            f"{name} is a tensor of layout {leaf.layout}, which cannot be split: give a list of microbatches, "
            f"say how to split it with split={{{key!r}: function}}, or make it dense by {dense}()"
        )
    if not -leaf.dim() <= dim < leaf.dim():
        raise ValueError(
            f"{name} of shape {tuple(leaf.shape)} has no dimension {dim} to split along: give another with "
            f"split={{{key!r}: dimension}}, or 'replicate', or a function that splits the whole argument"
        )
    if (rows := leaf.shape[dim]) < num_microbatches:
        or_pass = f", or pass num_microbatches={rows} to this call if the schedule allows it" if rows else ""
        raise ValueError(
            f"{name} has {rows} rows (dimension {dim} of {tuple(leaf.shape)}) but num_microbatches = "
            f"{num_microbatches}: give at least one row per microbatch{or_pass}"
        )
    # of a DTensor: splitting it would be a collective, which other ranks of the pipeline do not call
    placements = getattr(leaf, "placements", ())
    if any(one.is_partial() or one.is_shard(dim % leaf.dim()) for one in placements):
        raise ValueError(
            f"{name} is a DTensor with the placements {placements}, and is split along dimension {dim}: give the "
            "local rows, by to_local(), or all of them, by full_tensor()"
        )
    if leaf.requires_grad or type(leaf) is not torch.Tensor:
        return leaf.tensor_split(num_microbatches, dim)
    # Views share a version counter: an in-place change of one microbatch would invalidate tensors that others saved
    # for their backward. These share only memory.
    return leaf.unsafe_split_with_sizes(list(rows_of_split(leaf.shape[dim], num_microbatches)), dim)


def _split_block_mask(mask: Any, num_microbatches: int, dim: int, name: str, key: str | int) -> list[Any]:
    """A BlockMask of each microbatch's rows, whose ``mask_mod`` still gets the row of the whole batch."""
    rows = _rows_of_mask(mask)
    if rows == 1:
        return [mask] * num_microbatches
    if dim != 0:
        raise ValueError(f"split[{key!r}] = {dim}: {name} is a BlockMask, which is split along its batch only: give 0")
    if rows < num_microbatches:
        raise ValueError(
            f"{name} is a BlockMask of {rows} rows but num_microbatches = {num_microbatches}: give at least one row "
            "per microbatch, or one row (create_block_mask with B=None) for all"
        )
    sizes = list(rows_of_split(rows, num_microbatches))
    # a tensor, not a number: flex_attention, compiled, takes it as an input, and is compiled once for all microbatches
    firsts = torch.arange(rows, device=mask.kv_num_blocks.device)
    starts = accumulate(sizes[:-1], initial=0)
    return [_rows_of_block_mask(mask, start, size, firsts) for start, size in zip(starts, sizes, strict=True)]


def _rows_of_block_mask(mask: Any, start: int, size: int, firsts: torch.Tensor) -> Any:
    first, mask_mod = firsts[start], mask.mask_mod

    def shifted(b: torch.Tensor, h: torch.Tensor, q_idx: torch.Tensor, kv_idx: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = mask_mod(b + first, h, q_idx, kv_idx)
        return found

    part = copy.copy(mask)
    # every tensor of it, those of the backward included, has the batch as its first dimension
    for attribute, value in vars(mask).items():
        if isinstance(value, torch.Tensor) and value.shape[0] > 1:
            setattr(part, attribute, value.narrow(0, start, size))
    part.mask_mod = shifted
    return part


def _rows_of_mask(mask: Any) -> int:
    """The rows of the batch that a BlockMask is for; one if it has no such dimension."""
    blocks: torch.Tensor = mask.kv_num_blocks
    return blocks.shape[0] if blocks.dim() == 3 else 1


def lengths(value: Any, rule: Rule, name: str) -> dict[str, int]:
    """The rows of a whole batch's tensors, by name; empty if it is not split along a dimension."""
    if not _is_whole(rule) or is_list_of_microbatches(value):
        return {}
    if isinstance(value, torch.Tensor):
        return {name: value.shape[rule]} if value.dim() else {}
    leaves, _ = pytree.tree_flatten_with_path(value, is_leaf=_is_one_value)
    found = {name + pytree.keystr(path): leaf for path, leaf in leaves}
    tensors = {leaf: tensor for leaf, tensor in found.items() if isinstance(tensor, torch.Tensor) and tensor.dim()}
    masks = {leaf: _rows_of_mask(mask) for leaf, mask in found.items() if is_block_mask(mask)}
    return {leaf: tensor.shape[rule] for leaf, tensor in tensors.items()} | masks


def rows_of_split(rows: int, num_microbatches: int) -> Iterator[int]:
    """The sizes that `torch.tensor_split` produces."""
    least, more = divmod(rows, num_microbatches)
    return (least + (number < more) for number in range(num_microbatches))


Counted = tuple[tuple[int, int], list[int]]
"""Priority of the argument (targets, then positional, then keyword arguments), and its rows per microbatch. The lowest
priority of all ranks is used."""


def count_rows(
    targets: Sequence[Any] | None, columns: Sequence[Sequence[Any]], named: Mapping[str, Sequence[Any]], rules: Rules
) -> Counted | None:
    """The rows of the first argument that has rows: scalars and arguments shared by all microbatches have none.

    Args:
        columns: each positional argument by microbatch.
        named: each keyword argument by microbatch.
    """
    places: list[tuple[tuple[int, int], Sequence[Any], str | int]] = [((0, 0), targets or [], "target")]
    places += [((1, i), column, i) for i, column in enumerate(columns)]
    places += [((2, i), values, name) for i, (name, values) in enumerate(named.items())]
    found = ((place, rows_of(values, rule_for(rules, key))) for place, values, key in places)
    return next(((place, rows) for place, rows in found if rows), None)


def rows_of(microbatches: Sequence[Any], rule: Rule) -> list[int] | None:
    """The rows of each microbatch: the length of its first tensor along the split dimension; None if unknown."""
    if len(microbatches) > 1 and all(microbatch is microbatches[0] for microbatch in microbatches):
        return None
    dim = rule if _is_whole(rule) else 0
    rows = []
    for microbatch in microbatches:
        is_tensor = isinstance(microbatch, torch.Tensor)
        first = microbatch if is_tensor else next(iter(tensor_leaves(microbatch)), None)
        if first is None or not -first.dim() <= dim < first.dim():
            return None
        check_has_shape(first)
        rows.append(first.shape[dim])
    return rows


def merge(outputs: Sequence[Any], rules: Rules) -> Any:
    """The outputs of all microbatches as one.

    Tensors are concatenated along the dimension of their rule (default 0); 0-dimensional tensors are stacked; other
    values are collected in a list; ``"replicate"`` takes the first; a function gets the list. Rules apply by name to
    entries of a dict and fields of a NamedTuple or a dataclass registered with pytree, by position to those of a tuple.
    Nested values use the rule of the entry that contains them. Rules are checked by `check_merge_rules`, once a step.
    """
    entries = [_entries(output) for output in outputs]
    if entries[0] is None:
        return _merge_one(list(outputs), rule_for(rules, 0))
    others = [found or {} for found in entries]
    if any(found.keys() != entries[0].keys() for found in others):
        raise ValueError(
            "merge: the microbatches' outputs do not have the same entries; use merge=False, or a function"
        )
    return _rebuilt(
        outputs[0], [_merge_one([found[key] for found in others], rule_for(rules, key)) for key in entries[0]]
    )


def _entries(output: Any) -> dict[Any, Any] | None:
    """The entries of an output by name, as microbatches may have another order, or by position; None for a leaf."""
    if isinstance(output, Mapping):
        return dict(output)
    if isinstance(output, tuple | list):
        return dict(zip(getattr(output, "_fields", range(len(output))), output, strict=True))
    if pytree.tree_is_leaf(output):
        return None
    pairs, _ = pytree.tree_flatten_with_path(output, is_leaf=lambda value: value is not output)
    names = (getattr(path[0], "name", getattr(path[0], "key", i)) for i, (path, _) in enumerate(pairs))
    return dict(zip(names, (value for _, value in pairs), strict=True))


def _rebuilt(like: Any, children: list[Any]) -> Any:
    if isinstance(like, Mapping) and pytree.tree_is_leaf(like):
        return dict(zip(like, children, strict=True))
    _, structure = pytree.tree_flatten(like, is_leaf=lambda value: value is not like)
    return pytree.tree_unflatten(children, structure)


def check_merge_rules(output: Any, rules: Rules) -> None:
    """Refuse a rule for an output that does not exist."""
    if not isinstance(rules, Mapping):
        return
    keys = list(_entries(output) or [0])
    unknown = [key for key in rules if key not in keys]
    if unknown:
        raise ValueError(f"merge[{unknown[0]!r}]: the model has no such output; its outputs are {keys}")


def _merge_one(values: list[Any], rule: Rule) -> Any:
    if callable(rule):
        return rule(values)
    if rule == REPLICATE:
        return values[0]
    assert isinstance(rule, int), "checked when the Pipeline is built"
    if _entries(values[0]) is not None and all(type(value) is type(values[0]) for value in values):
        return merge(values, rule)
    if not all(isinstance(value, torch.Tensor) for value in values):
        return values
    if values[0].dim() == 0:
        return torch.stack(values)
    try:
        return torch.cat(values, rule)
    except (IndexError, RuntimeError) as error:
        shapes = sorted({str(tuple(value.shape)) for value in values})  # sizes of nested tensors have no order
        raise ValueError(
            f"merge: outputs of shape {' and '.join(shapes)} cannot be concatenated along dimension {rule}; "
            "give merge another dimension, a function of their list, or False"
        ) from error
