"""Weights of Hugging Face models from safetensors files, for the local stages only."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastpipe.checks import check_type
from fastpipe.runtime.common import first_line, is_dtensor, listed
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model import HuggingFaceStage, check_equal, with_all_names
from fastpipe.runtime.pipeline import Pipeline

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_FLOATS = ("F64", "F32", "F16", "BF16")

logger = logging.getLogger("fastpipe")


_Source = tuple[Sequence[str], Callable[[list[torch.Tensor]], dict[str, torch.Tensor]]]
"""Tensors of the files that are read together, and a function that makes values of them, by their keys."""


def load_safetensors(path: str | os.PathLike[str], pipe: Pipeline) -> None:
    """Load the weights that ``save_pretrained`` of transformers wrote, or any files in that form. Collective.

    Each process reads the tensors of its own stages only. Stages on meta get memory before. Values are converted to the
    dtype of the parameters. Of a tied weight one name is enough. For a model that `fastpipe.split` has split, names and
    tensors that transformers changes when it loads (experts that are stored one by one, for example) are changed in the
    same way. Before anything changes, the ranks check that all keys are there, with the right shapes.

    Args:
        path: a folder with ``model.safetensors.index.json`` and the files that it names, or with
            ``model.safetensors``; or one such file.
        pipe: a pipeline of the same model: keys are those of its `state_dict`.

    Raises:
        FileNotFoundError: if there are no such files.
        KeyError: for a key that the files lack.
        ValueError: for another shape, quantized values, or an invalid index.
        ImportError: without the package safetensors.
        StepError: if another rank cannot load.
    """
    check_type(Pipeline, pipe=pipe)
    call = f"load_safetensors of {path}"
    files: dict[str, Path] = {}
    sources: list[_Source] = []
    ties = pipe._local.ties

    def check() -> Reply:
        if find_spec("safetensors") is None:
            raise ImportError("fastpipe.load_safetensors needs safetensors: python -m pip install safetensors")
        files.update(_files_of(path))
        state = with_all_names(pipe.state_dict(), ties, "meta")
        sources.extend(_sources(state, files, [tie.keys for tie in ties], _model_in(pipe)))
        _check(sources, state, files, path)
        return {"there": list(files), "used": [*state, *(name for names, _ in sources for name in names)]}

    def read() -> Reply:
        state = with_all_names(pipe.to_empty().state_dict(), ties)
        with torch.no_grad(), _opener(files, pipe.device) as file_of:
            for names, make in sources:
                values = [file_of(name).get_tensor(name) for name in names]
                for key, value in make(values).items():
                    if key in state:
                        _copy(state[key], value)
        check_equal(state, ties)
        pipe._steps.copies.loaded()
        return {}

    replies = pipe._steps.all_gather(call, check)
    left = sorted(set(replies[0]["there"]).difference(*(reply["used"] for reply in replies)))
    if left and pipe.rank == 0:
        logger.warning(
            "%s has tensors that no stage has, and that are not loaded (%d): %s", path, len(left), listed(left)
        )
    pipe._steps.all_gather(call, read)


def _files_of(path: str | os.PathLike[str]) -> dict[str, Path]:
    """The file of every key."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"path = {path!r}: give the folder that save_pretrained has written")
    given = Path(path)
    index, single = given / INDEX, given / SINGLE if given.is_dir() else given
    if index.is_file():
        try:
            names = json.loads(index.read_text())["weight_map"]
            files = {str(key): given / name for key, name in names.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{index} is no index of safetensors files: {error!r}; save the model again") from None
        absent = [file for file in files.values() if not file.is_file()]
        if absent:
            raise FileNotFoundError(f"{absent[0]} is missing, and {index} names it; copy the whole folder")
        return files
    if not single.is_file():
        what = f"has neither {INDEX} nor {SINGLE}" if given.is_dir() else "does not exist"
        raise FileNotFoundError(f"path = {str(path)!r} {what}: give the folder that save_pretrained has written")
    with _opened(single, torch.device("cpu")) as tensors:
        return dict.fromkeys(tensors.keys(), single)


def _opened(file: Path, device: torch.device) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, "pt", device=str(device))
    except SafetensorError as error:
        raise ValueError(f"{file} is no safetensors file: {error}") from None


@contextlib.contextmanager
def _opener(files: Mapping[str, Path], device: torch.device) -> Iterator[Callable[[str], Any]]:
    """A function from a tensor's name to its file, which it opens when the first of its tensors is asked for.

    Args:
        files: the file of every tensor.
        device: where tensors are read to.
    """
    with contextlib.ExitStack() as stack:

        @functools.cache
        def opened(path: Path) -> tuple[Any, set[str]]:
            file = stack.enter_context(_opened(path, device))
            return file, set(file.keys())

        def file_of(name: str) -> Any:
            file, names = opened(files[name])
            if name not in names:
                raise KeyError(f"{files[name]} has no {name!r}, which {INDEX} says it has; save the model again")
            return file

        yield file_of


def _model_in(pipe: Pipeline) -> Any:
    """The model of transformers of which this process has stages; None without."""
    stages = (unwrapped(module) for module in pipe.stage_modules.values())
    return next((stage.as_model() for stage in stages if isinstance(stage, HuggingFaceStage)), None)


def _sources(
    state: Mapping[str, Any], files: Iterable[str], ties: Sequence[Sequence[str]], model: Any
) -> list[_Source]:
    """Where the values of a state come from, in the files' names.

    A tensor of the files belongs to a key by its own name, or by that which transformers gives it; several may be the
    parts of one value.
    """
    names_of = {key: [key, *(other for names in ties if key in names for other in names)] for key in state}
    known = dict.fromkeys((name for names in names_of.values() for name in names), True)
    rename, converters = (_as_it_is, {}) if model is None else _conversions(model, known)
    parts: dict[str, list[tuple[str, str]]] = {}
    for file_name in sorted(files, key=_numbers_as_such):
        name, pattern = rename(file_name)
        if name in known and pattern is not None:
            parts.setdefault(name, []).append((file_name, pattern))
        elif name in known:
            parts[name] = [(file_name, "")]
    sources: list[_Source] = []
    for key, names in names_of.items():
        name = next((name for name in names if name in parts), key)
        for file_name, pattern in parts.get(name, ())[:1]:
            if pattern:
                joined = functools.partial(_joined, converters[pattern], model, name, parts[name])
                sources.append(([part for part, _ in parts[name]], joined))
            else:
                sources.append(([file_name], functools.partial(_only, key)))
    return sources


def _as_it_is(name: str) -> tuple[str, None]:
    return name, None


def _conversions(model: Any, known: dict[str, bool]) -> tuple[Callable[[str], tuple[str, str | None]], dict[str, Any]]:
    """How transformers loads a model: a function from a name in a file to that of the value, with the pattern of the
    converter that makes the value; and the converters by these patterns."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    conversions = get_model_conversion_mapping(model)
    renamings = [one for one in conversions if isinstance(one, WeightRenaming)]
    converters = [one for one in conversions if isinstance(one, WeightConverter)]

    def rename(name: str) -> tuple[str, str | None]:
        found: tuple[str, str | None] = rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        return found if found[0] in known or name not in known else (name, None)

    return rename, {pattern: converter for converter in converters for pattern in converter.source_patterns}


def _only(key: str, tensors: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {key: tensors[0]}


def _joined(
    converter: Any, model: Any, key: str, names: Sequence[tuple[str, str]], tensors: list[torch.Tensor]
) -> dict[str, torch.Tensor]:
    """What a converter of transformers makes of tensors; those of other keys, too, if it splits them."""
    converter = copy.deepcopy(converter)  # it collects tensors
    for (name, pattern), tensor in zip(names, tensors, strict=True):
        converter.add_tensor(key, name, pattern, tensor)
    made = converter.convert(key, model=model, config=model.config)
    return {key: value[0] if isinstance(value, list) else value for key, value in made.items()}


def _numbers_as_such(name: str) -> list[str | int]:
    """For sorting: expert 2 before expert 10."""
    return [int(part) if i % 2 else part for i, part in enumerate(re.split(r"(\d+)", name))]


def _check(sources: Sequence[_Source], state: Mapping[str, Any], files: Mapping[str, Path], path: Any) -> None:
    """Compare what the files have with a state, without reading values."""
    found: set[str] = set()
    with _opener(files, torch.device("cpu")) as file_of:
        for names, make in sources:
            slices = [file_of(name).get_slice(name) for name in names]  # not read
            described = [(tuple(part.get_shape()), part.get_dtype()) for part in slices]
            where = f"{listed(names)} in {files[names[0]]}"
            try:
                made = make([torch.empty(shape, device="meta") for shape, _ in described])
            except Exception as error:  # raised again with what was read
                raise ValueError(f"transformers cannot load {where}: {first_line(error)}") from error
            for key in state.keys() & made.keys():
                _check_value(key, state[key], made[key].shape, described, where)
                found.add(key)
    if missing := [key for key in state if key not in found]:
        raise KeyError(
            f"{os.fspath(path)} has no {missing[0]!r}, which the pipeline needs; it has {listed(sorted(files))}: pass "
            "a file saved from a model of the same class"
        )


def _check_value(
    key: str, target: Any, shape: Sequence[int], described: Sequence[tuple[Sequence[int], str]], where: str
) -> None:
    if tuple(shape) != tuple(target.shape):
        raise ValueError(
            f"{key} has shape {tuple(target.shape)} in the pipeline but {tuple(shape)} in {where}: build the pipeline "
            "of the same model"
        )
    quantized = [dtype for _, dtype in described if dtype not in _FLOATS]
    if quantized and target.dtype.itemsize > 1 and target.dtype.is_floating_point:
        raise ValueError(
            f"{key} is {target.dtype} in the pipeline but {quantized[0]}, which is quantized, in {where}: load it with "
            "from_pretrained of transformers, dequantized, and save it again"
        )


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        spread: Any = target
        # each rank reads the whole tensor and keeps its shard: nothing is sent
        value = distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)
    target.copy_(value)
