"""Weights of Hugging Face models from safetensors files, for the local stages only."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from fastpipe.runtime.common import is_dtensor, listed
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.pipeline import Pipeline

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"

logger = logging.getLogger("fastpipe")


def load_safetensors(path: str | os.PathLike[str], pipe: Pipeline) -> None:
    """Load the weights that ``save_pretrained`` of transformers wrote, or any files in that form. Collective.

    Each process reads the tensors of its own stages only. Stages on meta get memory before. Values are converted to the
    dtype of the parameters. Of a tied weight one name is enough. Before anything changes, the ranks check that all keys
    are there, with the right shapes.

    Args:
        path: a folder with ``model.safetensors.index.json`` and the files that it names, or with
            ``model.safetensors``; or one such file.
        pipe: a pipeline of the same model: keys are those of its `state_dict`.

    Raises:
        FileNotFoundError: if there are no such files.
        KeyError: for a key that the files lack.
        ValueError: for another shape, or an index that is none.
        ImportError: without the package safetensors.
        StepError: if another rank cannot load.
    """
    call = f"load_safetensors of {path}"
    sources: dict[str, tuple[Path, str]] = {}

    def check() -> Reply:
        if find_spec("safetensors") is None:
            raise ImportError("fastpipe.load_safetensors needs safetensors: python -m pip install safetensors")
        files = _files_of(path)
        state = pipe.state_dict()
        sources.update(_sources(state, files, [tie.names for tie in pipe._local.ties], path))
        _check_shapes(state, sources)
        return {"there": list(files), "used": [*state, *(name for _, name in sources.values())]}

    def read() -> Reply:
        state = pipe.to_empty().state_dict()
        with torch.no_grad():
            for file, keys in _by_file(sources).items():
                with _opened(file, pipe.device) as tensors:
                    for key in keys:
                        _copy(state[key], tensors.get_tensor(sources[key][1]))
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


def _sources(
    state: Mapping[str, Any], files: Mapping[str, Path], ties: Sequence[Sequence[str]], path: Any
) -> dict[str, tuple[Path, str]]:
    """For every key of a state, the file and the name in it."""
    found = {}
    for key in state:
        names = [key, *(other for names in ties if key in names for other in names)]
        name = next((name for name in names if name in files), None)
        if name is None:
            raise KeyError(
                f"{os.fspath(path)} has no {key!r}, which the pipeline needs; it has {listed(sorted(files))}: pass "
                "a file saved from a model of the same class; transformers saves some with other names, and experts "
                "one by one: save those with model.save_pretrained(folder, save_original_format=False)"
            )
        found[key] = files[name], name
    return found


def _by_file(sources: Mapping[str, tuple[Path, str]]) -> dict[Path, list[str]]:
    found: dict[Path, list[str]] = {}
    for key, (file, _) in sources.items():
        found.setdefault(file, []).append(key)
    return found


def _check_shapes(state: Mapping[str, Any], sources: Mapping[str, tuple[Path, str]]) -> None:
    for file, keys in _by_file(sources).items():
        with _opened(file, torch.device("cpu")) as tensors:
            there = set(tensors.keys())
            for key in keys:
                name = sources[key][1]
                if name not in there:
                    raise KeyError(f"{file} has no {name!r}, which {INDEX} says it has; save the model again")
                shape = tuple(tensors.get_slice(name).get_shape())
                if shape != tuple(state[key].shape):
                    raise ValueError(
                        f"{key} has shape {tuple(state[key].shape)} in the pipeline but {shape} in {file}: build the "
                        "pipeline of the same model"
                    )


def _copy(target: torch.Tensor, value: torch.Tensor) -> None:
    if is_dtensor(target):
        from torch.distributed.tensor import distribute_tensor

        spread: Any = target
        # each rank reads the whole tensor and keeps its shard: nothing is sent
        value = distribute_tensor(value, spread.device_mesh, spread.placements, src_data_rank=None)
    target.copy_(value)
