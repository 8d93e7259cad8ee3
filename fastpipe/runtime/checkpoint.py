"""Checkpoints: a thin layer over `torch.distributed.checkpoint` (DCP).

Keys are those of the unsplit model, so any schedule, any number of ranks and the plain model can load a checkpoint.
A value on several ranks is written once, and each rank reads only what it needs. All ranks agree on the checks before
they call DCP, whose own exchange would wait for a rank that raised.

`fastpipe.checkpoint_folder` defines when a folder is complete and how its files are checked; `_Writer` and `_Reader`
connect it to DCP. DCP's first rank completes a save, after it received the results of all others.

Optimizer states are keyed by parameter name, in the flattened form of `torch.distributed.checkpoint.state_dict`:
``"state.<name>.<key>"`` and ``"param_groups.<name>.<key>"``, with hyperparameters once per parameter. Parameter groups
may differ between ranks.
"""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import os
import pickle
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from fastpipe.checkpoint_folder import (
    FILE_PREFIX,
    METADATA,
    Manifest,
    Save,
    check_contents,
    check_files,
    check_size,
    check_target,
    locate,
    real_path,
    sync_folder,
)
from fastpipe.checks import check_flags, check_type, is_whole
from fastpipe.errors import StepError
from fastpipe.runtime.common import (
    Failure,
    FailureError,
    attended,
    cause_text,
    is_dtensor,
    listed,
    lost_named,
    lost_text,
    pytree,
    torch_private,
    unrepeated,
    waiting,
)
from fastpipe.runtime.coordination import Control, Reply
from fastpipe.runtime.model import with_all_names
from fastpipe.runtime.pipeline import Pipeline
from fastpipe.runtime.safe_load import ValuePlanner, check_loadable, read_metadata
from fastpipe.runtime.transport import SharedCall, drop_side_group, gather_messages, side_group

Optimizers = Sequence[torch.optim.Optimizer]
Names = Mapping[int, str]
"""``id`` of a parameter to its name in the whole model."""

_GROUPS = "param_groups"
_LOCAL = ("params", "param_names")
"""Entries of a group that differ between ranks."""
_FLAT = (torch.Tensor, int, float, tuple, str, type(None))


def flat_state(optimizers: Optimizers, names: Names) -> dict[str, Any]:
    """The flattened state of the optimizers.

    Raises:
        ValueError: for a parameter that is not the pipeline's, or a state that is neither tensor nor plain value, or
            is not sharded like its parameter.
    """
    flat: dict[str, Any] = {}
    for group, name, parameter, optimizer in _parameters(optimizers, names):
        values = [("state", key, value) for key, value in optimizer.state.get(parameter, {}).items()]
        if is_dtensor(parameter):
            for _, key, value in values:
                if isinstance(value, torch.Tensor):
                    _check_sharded(name, parameter, key, value.shape, is_sharded=is_dtensor(value))
        values += [(_GROUPS, key, value) for key, value in group.items() if key not in _LOCAL]
        for section, key, value in values:
            # first the usual types, as it takes long to see that they are no Mapping
            is_nested = not isinstance(value, _FLAT) and isinstance(value, Mapping | list)
            if is_nested or not isinstance(key, str) or "." in key:
                raise ValueError(
                    f"optimizer: {section} of {name} has {key!r}, a {type(value).__name__}: only tensors and plain "
                    "values can be saved, under names without a dot"
                )
            flat[f"{section}.{name}.{key}"] = value
    return flat


def _check_sharded(name: str, parameter: nn.Parameter, key: str, shape: torch.Size, *, is_sharded: bool) -> None:
    """Refuse a state that is not sharded like its parameter: checkpoints do not have how it was sharded."""
    if shape.numel() > 1 and not (is_sharded and shape == parameter.shape):
        raise ValueError(
            f"optimizer: state of {name} has {key!r}, a {'DTensor' if is_sharded else 'tensor'} of shape "
            f"{tuple(shape)}, and the parameter is a DTensor of shape {tuple(parameter.shape)}: of such a parameter, "
            "only state that is sharded in the same way, and single numbers, can be saved and loaded; use another "
            "optimizer (AdamW, for example), or save and load without optimizer"
        )


def template(optimizers: Optimizers, names: Names, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Empty tensors for the optimizer state that a checkpoint has.

    Args:
        saved: the checkpoint's metadata by flattened key.

    Raises:
        KeyError: for a parameter that was not in an optimizer when the checkpoint was saved.
        ValueError: for a state that cannot be sharded like its parameter.
    """
    index = _by_parameter(saved)
    found: dict[str, Any] = {}
    for _, name, parameter, _ in _parameters(optimizers, names):
        if (_GROUPS, name) not in index:
            raise KeyError(
                f"the checkpoint has no state of an optimizer for {name!r}: it was saved without one (by "
                "transformers, with save_only_model=True), or this weight was not in it (tied to another one, or "
                "frozen); load the model alone, and begin with a new optimizer"
            )
        for section in ("state", _GROUPS):
            entries = index.get((section, name), {})
            found |= {f"{section}.{name}.{key}": _empty(name, parameter, key, entry) for key, entry in entries.items()}
    return found


def _by_parameter(flat: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Entries by section and parameter name."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found.setdefault((section, name), {})[key] = value
    return found


def _empty(name: str, parameter: nn.Parameter, key: str, entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    if is_dtensor(parameter):
        _check_sharded(name, parameter, key, entry.size, is_sharded=entry.size == parameter.shape)
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        # sharded like the parameter
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def load_flat_state(
    optimizers: Optimizers, names: Names, flat: Mapping[str, Any], converted: Container[str] = ()
) -> None:
    """Load a state into the optimizers.

    Args:
        converted: the names of parameters that now have another dtype than when they were saved: torch converts their
            state, too. Other states keep their dtype, also one that is not the parameter's.

    Raises:
        ValueError: if parameters of one group were saved with different hyperparameters.
    """
    index = _by_parameter(flat)
    for optimizer in optimizers:
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {id(parameter): number for number, parameter in enumerate(parameters)}
        states = {numbers[id(parameter)]: index.get(("state", names[id(parameter)])) for parameter in parameters}
        groups = []
        for group in optimizer.param_groups:
            found = {name: index[_GROUPS, name] for name in (names[id(p)] for p in group["params"])}
            groups.append({**group, **_agreed(found), "params": [numbers[id(p)] for p in group["params"]]})
        state = {number: values for number, values in states.items() if values}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
        for parameter in parameters:
            if names[id(parameter)] not in converted:
                _keep_dtypes(optimizer.state.get(parameter, {}), state.get(numbers[id(parameter)], {}))


def _keep_dtypes(loaded: dict[str, Any], saved: Mapping[str, Any]) -> None:
    """Undo that torch has converted a state to its parameter's dtype: momentum in fp32 of a parameter in bf16."""
    for key, value in saved.items():
        found = loaded.get(key)
        if isinstance(value, torch.Tensor) and isinstance(found, torch.Tensor) and found.dtype != value.dtype:
            loaded[key] = value.to(found.device)


def _agreed(found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The hyperparameters of one group, which must be equal for its parameters."""
    first = next(iter(found), "")
    for name, values in found.items():
        for key, value in values.items():
            if found[first].get(key) != value:
                raise ValueError(
                    f"optimizer: {first} and {name} are in one group, and had {key} = {found[first].get(key)} and "
                    f"{value} when they were saved; group the parameters as they were"
                )
    return found[first] if found else {}


def _parameters(
    optimizers: Optimizers, names: Names
) -> Iterator[tuple[Mapping[str, Any], str, nn.Parameter, torch.optim.Optimizer]]:
    for optimizer in optimizers:
        for number, group in enumerate(optimizer.param_groups):
            for parameter in group["params"]:
                if id(parameter) not in names:
                    raise ValueError(
                        f"optimizer: group {number} has a parameter of shape {tuple(parameter.shape)} that is none of "
                        "pipe.parameters()"
                    )
                yield group, names[id(parameter)], parameter, optimizer


# a single process without a group is supported; DCP warns of it, also from its own threads
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

logger = logging.getLogger("fastpipe")
_BEAT_SECONDS = 5.0
"""The period in which a rank that saves in the background says that it is alive."""
_pending: list[_Writing] = []
"""Saves in the background. The next save waits for them, as both use the same group."""


class _Writing(Future[Any]):
    """A save in the background, and whether the caller has read its outcome."""

    def __init__(self, folder: str) -> None:
        super().__init__()
        self.folder = folder
        self.is_read = False

    def result(self, timeout: float | None = None) -> Any:
        self.is_read = True
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self.is_read = True
        return super().exception(timeout)

    def copy_outcome(self, writing: Future[Any]) -> None:
        """Copy the outcome of the finished task."""
        error = writing.exception()
        if error is None:
            return self.set_result(writing.result())
        logger.error("the checkpoint %s was not saved: %s", self.folder, cause_text(error))
        self.set_exception(error)


class _SyncedFile(io.FileIO):
    """A file that is synced when closed, with the size and CRC-32 of its content, and why it could not be written."""

    size = crc32 = 0
    failure: int | None = None

    def write(self, data: Any) -> int:
        try:
            count = super().write(data)
        except OSError as error:
            self.failure = error.errno
            raise
        self.size, self.crc32 = self.size + count, zlib.crc32(memoryview(data)[:count], self.crc32)
        return count

    def close(self) -> None:
        try:
            if not self.closed:
                os.fsync(self.fileno())
        finally:
            super().close()


class _Files(FileSystem):
    """DCP's file system, which records the files written.

    Attributes:
        written: the size and CRC-32 of each file, by name.
    """

    def __init__(self) -> None:
        self.written: dict[str, tuple[int, int]] = {}

    @contextlib.contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        file = _SyncedFile(path, mode)
        try:
            with io.BufferedWriter(file) as stream:
                yield stream
        except Exception:  # raised again; torch.save raises another error when it cannot end its archive
            if file.failure is None:
                raise
            raise OSError(file.failure, os.strerror(file.failure), os.fspath(path)) from None
        self.written[Path(path).name] = (file.size, file.crc32)

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


@contextlib.contextmanager
def _sendable_errors() -> Iterator[None]:
    """Context for code of the user, such as an object's pickling, within DCP.

    DCP sends exceptions to the other ranks as pickles. One that cannot be sent would leave them waiting.
    """
    try:
        yield
    except Exception as error:  # raised again, or in its place one with its text
        try:
            pickle.loads(pickle.dumps(error))
        except Exception:  # of any type, from the user's exception
            raise RuntimeError(cause_text(error)) from error
        raise


class _Writer(FileSystemWriter):
    """DCP's writer into the folder of a `Save`, which DCP's first rank begins and completes.

    Args:
        keep: the number of checkpoints to keep; None for all.
        size: the number of processes that save.
    """

    def __init__(self, path: Path, step: int, keep: int | None, size: int) -> None:
        super().__init__(path, sync_files=False)  # _SyncedFile syncs, after a flush
        self.fs = self._files = _Files()
        self._target, self._step, self._keep, self._size = path, step, keep, size
        self._save: Save | None = None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        if len(plans) != self._size:
            # without a process group DCP saves the part of this process as the whole
            raise RuntimeError("the process group has been destroyed during the save")
        self._save = Save(self._target)
        # where each rank writes; DCP sends it with the plans
        places = (SimpleNamespace(prefix=FILE_PREFIX.format(i), folder=self._save.folder) for i in range(len(plans)))
        return [replace(plan, storage_data=place) for plan, place in zip(plans, places, strict=True)]

    @_sendable_errors()
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        self.path = plan.storage_data.folder
        results = super().write_data(plan, planner).value()
        sync_folder(plan.storage_data.folder)
        done: torch.futures.Future[list[WriteResult]] = torch.futures.Future()
        done.set_result([*results, WriteResult(MetadataIndex("files"), 0, dict(self._files.written))])
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        files: dict[str, tuple[int, int]] = {}
        for written in results:
            files |= written.pop().storage_data
        super().finish(metadata, results)
        assert self._save is not None
        files[METADATA] = self._files.written[METADATA]
        self._save.complete(self._step, len(results), files, self._keep)

    def discard(self) -> None:
        """Remove the files of a failed save."""
        if self._save is not None:
            self._save.discard()


class _Reader(FileSystemReader):
    """A reader that verifies the checksums of the files before it reads them; each rank verifies a part.

    Args:
        metadata: of the checkpoint, in place of DCP's own reading of it, which may execute code.
        files: the size and CRC-32 of each file, by name; empty for a checkpoint without a manifest.
        group: the processes that load together.
    """

    def __init__(self, folder: Path, metadata: Metadata, files: Mapping[str, tuple[int, int]], group: Any) -> None:
        super().__init__(folder)
        self._metadata, self._files, self._group = metadata, files, group

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return self._metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        check_contents(Path(self.path), self._files, *_place_in(self._group))
        return plan

    @_sendable_errors()
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> torch.futures.Future[None]:
        return super().read_data(plan, planner)


def _gather(own: Reply, pipe: Pipeline, group: Any) -> dict[int, Reply]:
    """The messages of the processes of a group, also of other pipelines; default: of all."""
    if not dist.is_initialized():
        return {0: own}
    # NCCL sends no tensors of a CPU
    found = gather_messages(own, group, pipe.device if dist.get_backend(group) == "nccl" else torch.device("cpu"))
    return dict(zip(dist.get_process_group_ranks(group or dist.group.WORLD), found, strict=True))


def _check_same(found: Mapping[int, Reply], key: str, says: str) -> None:
    """Refuse paths of messages that have different values of a key: folders of one name on different hosts, say, or the
    newest of a folder in which another process does not see it yet."""
    first = min(found)
    for process, own in found.items():
        if own[key] != found[first][key]:
            raise ValueError(
                f"path: process {first} has {found[first]['path']!r} and process {process} has {own['path']!r}, "
                f"{says}; give the same folder in all processes, on a shared file system, or a group of those that "
                "train one model"
            )


def _place_in(group: Any) -> tuple[int, int]:
    """This process's rank in a group, and the group's size."""
    return (dist.get_rank(group), dist.get_world_size(group)) if dist.is_initialized() else (0, 1)


def check_processes(pipe: Pipeline, group: Any = None) -> None:
    """Refuse to save or load with other processes than those of the pipeline: each would save a model of its own.

    Raises:
        RuntimeError: if torch's process group has been destroyed.
        ValueError: if ``group`` lacks a process of the pipeline.
    """
    ranks = pipe._site.member.ranks
    check_type(dist.ProcessGroup | None, group=group)
    if len(ranks) == 1:
        return
    if not dist.is_initialized():
        raise RuntimeError(
            "the process group has been destroyed, and the ranks of the pipeline save and load over it: call "
            "dist.destroy_process_group() after the last checkpoint, of one in the background after its result()"
        )
    members = dist.get_process_group_ranks(group or dist.group.WORLD)
    if missing := [rank for rank, process in enumerate(ranks) if process not in members]:
        raise ValueError(
            f"group has processes {members}, and rank {listed(missing)} of the pipeline is none of them: give a group "
            "of all processes of the pipeline, or None for all there are"
        )


@contextlib.contextmanager
def _errors_of_dcp(call: str, pipe: Pipeline, group: Any) -> Iterator[None]:
    """Raise an error of DCP unchanged on the rank where it occurred, and as StepError on the others."""
    try:
        yield
    except CheckpointException as error:
        own, _ = _place_in(group)
        first = own if own in error.failures else min(error.failures)
        raised, _ = error.failures[first]
        if first == own:
            raise raised from None
        cause = cause_text(raised)
        process, ranks = dist.get_process_group_ranks(group or dist.group.WORLD)[first], pipe._site.member.ranks
        rank = ranks.index(process) if process in ranks else None
        who = f"process {process}, of another pipeline," if rank is None else f"rank {rank}"
        raise StepError(f"{who} failed in {call}: {cause}", rank=rank, cause=cause) from error


def shared_call(pipe: Pipeline, group: Any = None) -> SharedCall:
    """A call that all processes of a group make together; default: all."""
    member, control = pipe._site.member, pipe._site.control
    processes: Sequence[int] = []
    with contextlib.suppress(LookupError, TypeError, ValueError, RuntimeError):  # `check_processes` refuses it
        processes = dist.get_process_group_ranks(group or dist.group.WORLD)
    return SharedCall(member, processes, control.num_processes, maps_ranks=not control.pipeline)


def _lost_named(pipe: Pipeline, group: Any) -> contextlib.AbstractContextManager[None]:
    """Context of DCP's collectives. The ranks of this pipeline watch each other; the others may be lost, too."""
    return lost_named("", lambda: pipe._site.member.lost_in(group or dist.group.WORLD))


def save_checkpoint(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Any = None,
    asynchronous: bool = False,
    keep: int | None = None,
    group: Any = None,
) -> Future[Any] | None:
    """Save the model, and optionally the optimizer, in a folder on a shared file system. Collective: call it on every
    rank.

    The folder is complete or absent at every instant. The ranks write into a temporary folder next to it, which rank 0
    renames when all files are on disk. An existing checkpoint is replaced only then, as a whole.

    The folder has ``model.<key of the unsplit model>``, ``optimizer.<...>`` in the flattened form of
    `torch.distributed.checkpoint.state_dict`, ``extra``, and the state of each process's random generator. A stage that
    two ranks hold is written once, with the buffers of one holder. ``manifest.json`` has the size and the checksum of
    each file.

    Args:
        path: a folder: new, empty, or an existing checkpoint, which is replaced. Its parent folder must be writable.
        pipe: the pipeline.
        optimizer: one or several, of `pipe.parameters()`.
        extra: other state of the script, the same on every rank: the step, the state of a learning-rate scheduler.
            Numbers, texts, tensors, NumPy arrays, paths and ``argparse.Namespace``, in tuples, lists, sets and dicts;
            and classes that `torch.serialization.add_safe_globals` allows, also when it is loaded.
        asynchronous: return when the state is copied, and write in the background.
        keep: the number of checkpoints to keep in the parent folder, including this one; older ones are removed when
            this one is complete. Default: all.
        group: the processes that save together; default: all. Replicas of a pipeline save together; pipelines of other
            models do not.

    Returns:
        None; or a future whose ``result()`` returns when the checkpoint is complete, or raises the error.

    Raises:
        ValueError: for an optimizer of other parameters, or with state that cannot be saved; for a value that would not
            be loaded, as its class could execute code; on every rank if some processes give an optimizer and others
            none, or another path; for a path with files other than a checkpoint's; for `keep` below 1; for a `group`
            without all processes of the pipeline.
        OSError: if the files cannot be written on this rank.
        StepError: if another rank cannot save, or exits during the save.
        RuntimeError: if the last save in the background failed and its future was not read; if torch's process group
            has been destroyed; if another thread saves, loads or gathers outputs of another pipeline.
    """
    check_type(Pipeline, "give it after the path", pipe=pipe)
    optimizers = as_optimizers(optimizer)
    state: dict[str, Any] = {}
    writers: list[_Writer] = []
    started: list[Future[Any]] = []
    call, step = f"save_checkpoint of {_shown(path)}" + (", asynchronous" if asynchronous else ""), pipe.step_count
    shared = shared_call(pipe, group)

    def gather() -> Reply:
        _await_pending()
        check_flags(asynchronous=asynchronous)
        check_processes(pipe, group)
        if keep is not None and not is_whole(keep, 1):
            raise ValueError(f"keep = {keep!r}: give a whole number of at least 1 (the new checkpoint counts), or None")
        check_target(path)
        whole = whole_state(pipe, optimizers, extra)
        _check_loadable(whole)
        # a copy for the background here, as the others are told if there is no room for it
        state.update(_copied(whole) if asynchronous else whole)
        writers.append(_Writer(real_path(path), step, keep, _place_in(group)[1]))
        return {}

    def write(_: Sequence[Reply]) -> None:
        with _lost_named(pipe, group):
            found = _gather({"path": os.fspath(path), "optimizes": optimizes(pipe, optimizers)}, pipe, group)
        with shared.raised_by_all(ValueError):
            check_all_optimize(found)
            _check_same(found, "path", "and all save into one folder")
        write_over = functools.partial(_write, writers[0], state)
        if asynchronous:
            started.append(_in_background(write_over, path, pipe, group, call, shared))
            return
        with _lost_named(pipe, group), shared.collective(CheckpointException):
            write_over(group)

    with _errors_of_dcp(call, pipe, group):
        pipe._steps.all_gather(call, gather, write, shared)
    return started[0] if started else None


def _shown(path: Any) -> str:
    """A path in messages; also something else that was given as one."""
    return os.fspath(path) if isinstance(path, str | os.PathLike) else repr(path)


def whole_state(pipe: Pipeline, optimizers: Optimizers, extra: Any) -> dict[str, Any]:
    """What this rank saves: sections by name; without copies of tensors."""
    pipe._steps.check_filled()
    names = names_of(pipe)
    model = pipe.state_dict()
    _check_unrepeated(model)
    # DCP saves a tuple as one value
    kept = {"extra": (extra,), "random": _generators(pipe), "steps": (pipe.step_count,)}
    return {"model": model, "optimizer": flat_state(optimizers, names)} | kept


def _check_unrepeated(state: Mapping[str, Any]) -> None:
    """Refuse a tensor of `expand`: torch copies nothing into its repeated elements, so it could not be loaded."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and unrepeated(value) is not value:
            raise ValueError(
                f"stages: elements of {key} share memory (by expand, for example), and a checkpoint could not be "
                "loaded into it: register a clone() of it, or register_buffer(..., persistent=False) for a constant"
            )


def _check_loadable(state: Mapping[str, Any]) -> None:
    for section, values in state.items():
        for key, value in values.items() if isinstance(values, dict) else [("", values)]:
            check_loadable(f"{section}.{key}" if key else section, value)


def _write(writer: _Writer, state: dict[str, Any], group: Any) -> None:
    try:
        save(state, storage_writer=writer, process_group=group, no_dist=not dist.is_initialized())
    except BaseException:  # raised again, after the files are removed
        writer.discard()
        raise


class _Peers:
    """The ranks that save in the background with this one. Each writes its beats, and why it failed, as its place.

    The save does not depend on these: they explain an error of Gloo, which names no rank.

    Args:
        elsewhere: returns the processes of other pipelines that may be lost.
    """

    def __init__(self, control: Control, timeout: float, call: str, elsewhere: Callable[[], Sequence[int]]) -> None:
        self._control, self._step, self._call, self._timeout = control, control.step, call, timeout
        self._elsewhere = elsewhere
        self._seconds, self._next, self._count = min(timeout / 4, _BEAT_SECONDS), 0.0, 0

    def lost(self) -> Failure | None:
        """The exit of another rank, if any. Polled; also writes the next beat."""
        if time.monotonic() >= self._next:
            self._next, self._count = time.monotonic() + self._seconds, self._count + 1
            self._put(str(self._count), is_active=True)
        return next(iter(self._control.dead), None)

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """Context of the save. An error of another rank becomes a StepError that names it, if possible."""
        cause = ""
        try:
            yield
        except FailureError as error:
            raise self._error(error.failure) from error
        except Exception as error:  # raised again; those within DCP's steps are in a CheckpointException
            if type(error) is RuntimeError or isinstance(error, dist.DistError):  # as Gloo raises
                raise self._error(self._explain(error)) from error
            cause = cause_text(error)  # for the others, which wait in a collective
            raise
        finally:
            self._put(cause, is_active=False)

    def _explain(self, error: RuntimeError) -> Failure:
        before = self._read()
        try:
            for pause in waiting(2 * self._seconds, self.lost):
                time.sleep(pause)
        except FailureError as lost:
            return lost.failure
        after = self._read()
        ended = {rank: cause for rank, (is_active, cause) in after.items() if not is_active}
        if failed := [rank for rank in ended if ended[rank]]:
            return Failure(failed[0], ended[failed[0]])
        ranks = range(self._control.size) if after else ()  # empty if the store does not answer
        if silent := [rank for rank in ranks if rank not in ended and before.get(rank) == after.get(rank)]:
            return Failure(silent[0], f"rank {listed(silent)} does not answer; see whether its process is stopped")
        advice = f"a process is silent, or writes for longer than timeout = {self._timeout:g} s: set a longer timeout"
        others = self._elsewhere()
        return Failure(
            None, f"{lost_text(others, error) if others else cause_text(error)}; if this is a timeout, {advice}"
        )

    def _error(self, failure: Failure) -> StepError:
        return failure.error(f"failed in {self._call}")

    def _put(self, text: str, *, is_active: bool) -> None:
        self._control.put_place(self._step, is_active, text, "save_checkpoint")

    def _read(self) -> dict[int, tuple[bool, str]]:
        """By rank, whether it is within this save, and its last beat or why it failed."""
        first, places = self._control.number - self._control.rank, self._control.places("save_checkpoint")
        own = {rank: places[first + rank] for rank in range(self._control.size) if first + rank in places}
        return {rank: (is_active, text) for rank, (step, is_active, text) in own.items() if step == self._step}


def _copied(state: dict[str, Any]) -> dict[str, Any]:
    # the stager copies a view like `x.conj()` without its conjugation, and `x.conj().imag` without its negation
    resolved = pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.resolve_conj().resolve_neg(), state)
    copy = DefaultStager(StagingOptions(False, False, False, False)).stage(resolved)
    assert isinstance(copy, dict)
    return copy


def _in_background(
    write: Callable[[Any], None], path: Any, pipe: Pipeline, group: Any, call: str, shared: SharedCall
) -> Future[Any]:
    """Write in a thread, over another group, as the script uses its own meanwhile. Collective.

    Args:
        write: writes the state over a group.
    """
    timeout = pipe._steps.ranks.timeout
    with _lost_named(pipe, group):
        side = side_group("save_checkpoint", group, timeout)
    peers = _Peers(pipe._steps.control, timeout, call, lambda: pipe._site.member.lost_in(side))

    def lost() -> Failure | None:
        return peers.lost() or shared.lost()

    def write_aside() -> None:
        with _errors_of_dcp(call, pipe, side), shared.published(), peers.explained():
            try:
                # it ends soon if a process is lost, as the interpreter waits for this thread when it exits
                with shared.collective(CheckpointException):
                    attended(lambda: write(side), lost, timedelta.max, opens=False)
            except Exception:  # raised again; errors within DCP's steps, of which all learn, are BaseExceptions
                drop_side_group("save_checkpoint", group)
                raise

    def write_and_judge() -> None:
        try:
            write_aside()
        except Exception:  # raised again, unless its cause is known
            check_processes(pipe, group)
            raise

    thread = ThreadPoolExecutor(1, "fastpipe-save")  # joined when the interpreter exits
    _pending.append(_Writing(_shown(path)))
    thread.submit(write_and_judge).add_done_callback(_pending[-1].copy_outcome)
    thread.shutdown(wait=False)
    return _pending[-1]


def load_checkpoint(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: Any = None,
) -> Any:
    """Load a checkpoint of `save_checkpoint`, written with any number of ranks and any schedule. Collective.

    Parameters are loaded in place (stages on meta get memory before), and `Pipeline.step_count` is set. Random
    generators are restored if as many processes load as saved; otherwise they are unchanged. With
    ``rng="per_microbatch"`` random numbers continue in any case, if `torch.manual_seed` was called with the same seed.

    Before anything changes, the size and the checksum of every file are verified, a part on each rank. A checkpoint
    without a manifest (written by DCP alone) logs a warning.

    Nothing that a file names is executed: values are read as by ``torch.load(weights_only=True)``, see
    `fastpipe.runtime.safe_load`.

    Args:
        path: the folder.
        pipe: a pipeline of the same model.
        optimizer: one or several, of `pipe.parameters()`, as when it was saved; None ignores the saved state.
        group: the processes that load together; default: all.

    Returns:
        The ``extra`` of the save; None for a checkpoint without one, such as one of DCP alone.

    Raises:
        FileNotFoundError: if there is no complete checkpoint.
        KeyError: if it lacks a key that is needed here.
        ValueError: if a file is missing or altered, files of two saves are mixed, or processes find different
            checkpoints; if a value's class could execute code; if the checkpoint has keys of the model that no rank
            loads, other shapes, other parameter groups, or two values for a tied weight; if some processes give an
            optimizer and others none.
        StepError: if another rank cannot load.
    """
    check_type(Pipeline, "give it after the path", pipe=pipe)
    optimizers = as_optimizers(optimizer)
    names = names_of(pipe)
    state: dict[str, Any] = {}
    saved: dict[str, Any] = {}
    readers: list[_Reader] = []
    own: list[Reply] = []
    call = f"load_checkpoint of {_shown(path)}"
    shared = shared_call(pipe, group)

    def prepare() -> Reply:
        _await_pending()
        check_processes(pipe, group)
        folder = locate(path)
        manifest, metadata = _checked(folder, warns=pipe.rank == 0)
        readers.append(_Reader(folder, metadata, manifest.files if manifest else {}, group))
        saved.update(metadata.state_dict_metadata)
        ties = pipe._local.ties
        state.update(model=with_all_names(pipe.state_dict(), ties, "meta"))
        state.update({name: None for name in ("extra", "steps") if name in saved})  # a plain model's save has neither
        _check_unrepeated(state["model"])
        _check_model(_flat_model(state["model"]), saved, path)
        state.update(model=with_all_names(pipe.to_empty().state_dict(), ties))
        state.update(optimizer=template(optimizers, names, _section(saved, "optimizer")))
        generators = _generators(pipe)
        state.update(random={key: value for key, value in generators.items() if f"random.{key}" in saved})
        save = (manifest.step, manifest.saved) if manifest else None
        own.append({"path": str(folder), "save": save, "optimizes": optimizes(pipe, optimizers)})
        return {"keys": list(_flat_model(state["model"]))}

    def read(replies: Sequence[Reply]) -> None:
        with _lost_named(pipe, group):
            found = _gather(own[0], pipe, group)
        with shared.raised_by_all(ValueError):
            check_all_optimize(found)
            _check_same(found, "save", "which are different checkpoints")
        _check_all_taken(_section(saved, "model"), replies, path)
        with _lost_named(pipe, group), shared.collective(CheckpointException):
            no_dist = not dist.is_initialized()
            load(state, storage_reader=readers[0], planner=ValuePlanner(), process_group=group, no_dist=no_dist)

    with _errors_of_dcp(call, pipe, group):
        pipe._steps.all_gather(call, prepare, read, shared)
    converted = _converted(pipe, saved)
    return restore_together(pipe, optimizers, lambda: {**state, "converted": converted}, call)


def restore_together(pipe: Pipeline, optimizers: Optimizers, read: Callable[[], Mapping[str, Any]], call: str) -> Any:
    """`restore` what ``read`` returns; an error on one rank is an error on every rank."""
    extras: list[Any] = []

    def take() -> Reply:
        extras.append(restore(pipe, optimizers, read()))
        return {}

    pipe._steps.all_gather(f"{call}, values", take)
    return extras[0]


def restore(pipe: Pipeline, optimizers: Optimizers, state: Mapping[str, Any]) -> Any:
    """Load a state of `whole_state`; returns its ``extra``."""
    names = names_of(pipe)
    pipe.load_state_dict(state["model"])
    load_flat_state(optimizers, names, state["optimizer"], state.get("converted", ()))
    _set_generators(pipe, state["random"])
    if "steps" in state:
        (pipe.step_count,) = state["steps"]
    return state["extra"][0] if "extra" in state else None


def names_of(pipe: Pipeline) -> Names:
    """The names of this rank's parameters, as in the model's state."""
    return {id(parameter): torch_private.name_in_state(name) for name, parameter in pipe.named_parameters()}


def as_optimizers(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> Optimizers:
    """The optimizers that a caller gave."""
    if optimizer is None:
        return []
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else optimizer
    if not isinstance(optimizers, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in optimizers):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch optimizer, or a list of them")
    _check_holds_state(optimizers)
    return list(optimizers)


def _check_holds_state(optimizers: Optimizers) -> None:
    """Refuse an optimizer whose state is in another one, inside of it, on one of the replicas."""
    zero = getattr(sys.modules.get("torch.distributed.optim"), "ZeroRedundancyOptimizer", ())
    if any(isinstance(one, zero) for one in optimizers):
        raise ValueError(
            "optimizer is a ZeroRedundancyOptimizer, whose state checkpoints would lack: shard the stages by "
            "fully_shard instead, which shards the state of any optimizer, or save and load without optimizer"
        )


def optimizes(pipe: Pipeline, optimizers: Optimizers) -> bool | None:
    """Whether this rank gives an optimizer; None if it has nothing to optimize."""
    trains = any(parameter.requires_grad for parameter in pipe.parameters())
    return bool(optimizers) if trains or optimizers else None


def check_all_optimize(found: Mapping[int, Reply]) -> None:
    """Raise ValueError if some processes give an optimizer and others none; of their messages."""
    given = {found[process]["optimizes"]: process for process in sorted(found, reverse=True)}
    if True in given and False in given:
        raise ValueError(
            f"optimizer: process {given[True]} gives one and process {given[False]} gives none; give it on every rank, "
            "or on none"
        )


def _checked(folder: Path, *, warns: bool) -> tuple[Manifest | None, Metadata]:
    """The manifest of a checkpoint, if it has one, and its metadata; files are checked for presence and size."""
    manifest = check_files(folder)
    if manifest is not None:
        check_contents(folder, {METADATA: manifest.files[METADATA]})
        return manifest, read_metadata(folder)
    if warns:
        logger.warning("the checkpoint %s has no manifest: its files cannot be verified", folder)
    metadata = read_metadata(folder)
    ends: dict[str, int] = {}
    for info in metadata.storage_data.values():
        ends[info.relative_path] = max(info.offset + info.length, ends.get(info.relative_path, 0))
    for name, end in ends.items():
        check_size(folder, name, end)
    return None, metadata


def _section(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): entry for key, entry in saved.items() if key.startswith(prefix)}


def _flat_model(state: Mapping[str, Any]) -> dict[str, Any]:
    """The state with the keys of a checkpoint, which has the entries of a dict (an extra state) one by one."""
    planner = DefaultSavePlanner()
    planner.set_up_planner({"model": dict(state)})
    return {key.removeprefix("model."): value for key, value in planner.state_dict.items()}


def _check_model(state: Mapping[str, Any], saved: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    for key, value in state.items():
        entry = saved.get(f"model.{key}")
        if entry is None:
            raise KeyError(f"the checkpoint {os.fspath(path)} has no {key!r}, which the pipeline needs")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        there = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != there:
            raise ValueError(
                f"{key} is {_shape_text(shape)} in the pipeline but {_shape_text(there)} in the checkpoint "
                f"{os.fspath(path)}: build the pipeline of the same model"
            )


def _shape_text(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"a tensor of shape {shape}"


def _converted(pipe: Pipeline, saved: Mapping[str, Any]) -> set[str]:
    """The names of parameters that had another dtype when they were saved."""
    found = set()
    for name, parameter in pipe.named_parameters():
        key = torch_private.name_in_state(name)
        entry = saved.get(f"model.{key}")
        if isinstance(entry, TensorStorageMetadata) and entry.properties.dtype != parameter.dtype:
            found.add(key)
    return found


def _check_all_taken(saved: Mapping[str, Any], replies: Sequence[Reply], path: str | os.PathLike[str]) -> None:
    left = saved.keys() - {key for reply in replies for key in reply["keys"]}
    if left:
        raise ValueError(
            f"the checkpoint {os.fspath(path)} has {min(left)!r} ({len(left)} such keys), which no stage has: build "
            "the pipeline of the same model"
        )


def _generators(pipe: Pipeline) -> dict[str, torch.Tensor]:
    rank, size = _place_in(None)
    states = {f"{rank}_of_{size}": torch.get_rng_state()}
    if pipe.device.type == "cuda":
        states[f"{rank}_of_{size}_cuda"] = torch.cuda.get_rng_state(pipe.device)
    return states


def _set_generators(pipe: Pipeline, states: Mapping[str, torch.Tensor]) -> None:
    for key, value in states.items():
        if key.endswith("_cuda"):
            torch.cuda.set_rng_state(value, pipe.device)
        else:
            torch.set_rng_state(value)


def _await_pending() -> None:
    """Wait for saves in the background.

    Raises:
        RuntimeError: if one failed and its future was not read.
    """
    while _pending:
        writing = _pending.pop()
        was_read = writing.is_read
        if (error := writing.exception()) is not None and not was_read:
            raise RuntimeError(f"the checkpoint {writing.folder} was not saved: {cause_text(error)}") from error
