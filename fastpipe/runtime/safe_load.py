"""The pickles of a checkpoint, read without executing anything.

`torch.distributed.checkpoint` (DCP) reads two kinds with pickle's own reader, which calls whatever a file names: its
metadata, and each value that is not a tensor. Here, the metadata may have the records of DCP only. A value is read by
``torch.load(weights_only=True)``: plain values, tensors, arrays of NumPy, and the classes that the script has allowed
by `torch.serialization.add_safe_globals`.
"""

from __future__ import annotations

import io
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import ReadItem

from fastpipe.checkpoint_folder import METADATA
from fastpipe.runtime.common import first_line, pytree

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
_ALLOWED: list[Any] = [
    Namespace,
    type(Path()),
    np.ndarray,
    np.dtype,
    np.float64().__reduce__()[0],
    np.zeros(0).__reduce__()[0],
    *sorted({type(np.dtype(code)) for code in np.typecodes["All"]}, key=str),
]
"""The options of a script, and what the pickles of NumPy's arrays and numbers name."""
_PLAIN = (bool, int, float, str, type(None))


class MetadataReader(FileSystemReader):
    """DCP's reader, with metadata that is read without executing anything.

    Args:
        folder: of the checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """
        Raises:
            ValueError: if the file has something else than DCP's records.
        """
        with open(self._folder / METADATA, "rb") as file:
            found = _Records(file).load()
        if not isinstance(found, Metadata):
            raise ValueError(f"{self._folder / METADATA} has a {type(found).__name__} instead of DCP's metadata")
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
        # the base class reads it with pickle: it gets what was read here
        super().load_bytes(read_item, _saved(_load(read_item.dest_index.fqn, value)))


def check_loadable(key: str, value: Any) -> None:
    """Refuse to save what would be refused when it is loaded.

    Args:
        key: names the value in errors.

    Raises:
        ValueError: for a value of a class that is not allowed.
    """
    if _is_plain(value) or isinstance(value, torch.Tensor):
        return
    # tensors can always be loaded, and may be large
    emptied = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.new_empty(0), value)
    _load(key, _saved(emptied))


def _is_plain(value: Any) -> bool:
    return type(value) in _PLAIN or (type(value) in (tuple, list) and all(map(_is_plain, value)))


def _saved(value: Any) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def _load(key: str, file: io.BytesIO) -> Any:
    try:
        with torch.serialization.safe_globals(_ALLOWED):
            return torch.load(file, weights_only=True)
    except pickle.UnpicklingError as error:
        file.seek(0)
        with torch.serialization.safe_globals(_ALLOWED):
            named = ", ".join(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(file)))
        raise ValueError(
            f"{key} of the checkpoint has {named or first_line(error)}, which is not read, since that could execute "
            "code: save numbers, texts, tensors and NumPy arrays in tuples, lists, sets and dicts; or, if you trust "
            f"it, call torch.serialization.add_safe_globals([{named}]) before saving and before loading"
        ) from None
