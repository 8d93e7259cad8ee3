"""The pickles of a checkpoint, read without executing anything.

`torch.distributed.checkpoint` (DCP) reads two kinds with pickle's own reader, which calls whatever a file names: its
metadata, and each value that is not a tensor. Here, the metadata may have the records of DCP only. A value is read by
``torch.load(weights_only=True)``: plain values, tensors, arrays of NumPy, and the classes that the script has allowed
by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import contextlib
import io
import pickle
import threading
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fastpipe.checkpoint_folder import METADATA
from fastpipe.runtime.common import pytree

_METADATA = "torch.distributed.checkpoint.metadata"
_RECORDS = {
    (_METADATA, "BytesStorageMetadata"),
    (_METADATA, "ChunkStorageMetadata"),
    (_METADATA, "Metadata"),
    (_METADATA, "MetadataIndex"),
    (_METADATA, "StorageMeta"),
    (_METADATA, "TensorProperties"),
    (_METADATA, "TensorStorageMetadata"),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    ("pathlib", "PosixPath"),
    ("pathlib._local", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
}
"""What metadata may name, beside dtypes."""
_OF_NUMPY = {"scalar": np.float64().__reduce__()[0], "_reconstruct": np.zeros(0).__reduce__()[0]}
_ALLOWED: list[Any] = [
    Namespace,
    bytes,
    frozenset,
    *((type(Path()), f"{module}.PosixPath") for module in ("pathlib", "pathlib._local")),
    np.ndarray,
    np.dtype,
    *sorted({type(np.dtype(code)) for code in np.typecodes["All"]}, key=str),
    *((made, f"numpy.{core}.multiarray.{name}") for name, made in _OF_NUMPY.items() for core in ("core", "_core")),
]
"""The options of a script, and what pickles of NumPy's arrays and numbers name, with the names in other versions."""
_LOCK = threading.Lock()
"""torch has one list of what is allowed, for all threads."""
_PLAIN = (bool, int, float, str, type(None))


def read_metadata(folder: Path) -> Metadata:
    """The metadata of a checkpoint, read without executing anything.

    Raises:
        ValueError: if the file has something else than DCP's records.
    """
    path = folder / METADATA
    with open(path, "rb") as file:
        found = _Records(file).load()
    if not isinstance(found, Metadata):
        raise ValueError(f"{path} has a {type(found).__name__} instead of DCP's metadata")
    return found


class _Records(pickle.Unpickler):
    """Takes DCP's records only."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(vars(torch).get(name), torch.dtype)
        if is_dtype or (module, name) in _RECORDS:
            return super().find_class(module, name)
        raise ValueError(
            f"the checkpoint's {METADATA} names {module}.{name}, which is none of DCP's records: it is not read, since "
            "that could execute code"
        )


class ValuePlanner(DefaultLoadPlanner):
    """DCP's plan of a load, whose values are read without executing anything."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """
        Raises:
            ValueError: for a value of a class that is not allowed.
        """
        # the base class reads it with pickle
        *path, last = self.mappings[read_item.dest_index.fqn]
        place: Any = self.original_state_dict
        for key in path:
            place = place[key]
        place[last] = _load(read_item.dest_index.fqn, value)


def check_loadable(key: str, value: Any) -> None:
    """Refuse to save what would be refused when it is loaded.

    Args:
        key: names the value in errors.

    Raises:
        ValueError: for a value of a class that is not allowed.
    """
    if _is_plain(value) or isinstance(value, torch.Tensor):
        return
    # these can always be loaded, and may be large
    file, emptied = io.BytesIO(), pytree.tree_map_only((torch.Tensor, np.ndarray), _emptied, value)
    try:
        torch.save(emptied, file)
    except (TypeError, AttributeError, pickle.PicklingError) as error:
        raise ValueError(f"{key} cannot be saved: {error}; leave it out, or save its state") from error
    file.seek(0)
    _load(key, file)


def _emptied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.new_empty(0)
    return value if value.dtype.hasobject else value.reshape(-1)[:0]


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))


@contextlib.contextmanager
def _allowed() -> Iterator[None]:
    """Context in which torch also reads `_ALLOWED`; what the script has allowed stays so."""
    with _LOCK:
        held = torch.serialization.get_safe_globals()
        with torch.serialization.safe_globals([each for each in _ALLOWED if each not in held]):
            yield


def _load(key: str, file: io.BytesIO) -> Any:
    with _allowed():
        try:
            return torch.load(file, weights_only=True)
        except pickle.UnpicklingError:
            named = _not_allowed(file)
    what = named or "what torch.load(weights_only=True) does not take"
    allow = f"; or, if you trust it, call torch.serialization.add_safe_globals([{named}]) before saving and loading"
    raise ValueError(
        f"{key} of the checkpoint has {what}, which is not read, since that could execute code: save numbers, texts, "
        f"tensors and NumPy arrays in tuples, lists, sets and dicts{allow if named else ''}"
    )


def _not_allowed(file: io.BytesIO) -> str:
    """The names of what is refused, if that is a class or a function."""
    file.seek(0)
    with contextlib.suppress(pickle.UnpicklingError):
        return ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
    return ""
