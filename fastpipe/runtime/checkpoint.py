"""Checkpoints: a thin layer over `torch.distributed.checkpoint` (DCP).

Keys are those of the unsplit model, so a checkpoint does not know how the model was cut: any schedule, any number of
ranks and the plain model can load it. DCP brings the rest: every rank writes what it holds, what several hold is
written once, and each reads what it needs. What is checked here first is agreed on by all ranks, as DCP's own exchange
would wait for a rank that gave up.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.distributed_c10d import default_pg_timeout

from fastpipe.runtime.control import Reply
from fastpipe.runtime.failure import cause_text
from fastpipe.runtime.group import registered_group
from fastpipe.runtime.optimizer_state import Optimizers, flat_state, put_back, template
from fastpipe.runtime.pipeline import Pipeline

# one process without a group is no mistake, which DCP warns of, also from threads of its own
warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)

logger = logging.getLogger("fastpipe")
_side_groups: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()
_pending: list[_Writing] = []
"""Saves in the background; the next one waits for them, as both would talk in the same group."""


class _Writing(Future[Any]):
    """A save in the background, and whether the script has asked how it went."""

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

    def settle(self, writing: Future[Any]) -> None:
        """It has come to its end."""
        error = writing.exception()
        if error is None:
            return self.set_result(writing.result())
        logger.error("the checkpoint %s was not saved: %s", self.folder, cause_text(error))
        self.set_exception(error)


def save_checkpoint(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    extra: Any = None,
    asynchronous: bool = False,
    group: Any = None,
) -> Future[Any] | None:
    """Write the model, and the optimizer, into a folder that all ranks see. Called on every rank alike.

    In the folder are ``model.<key of the unsplit model>``, ``optimizer.<...>`` in the flattened form of
    `torch.distributed.checkpoint.state_dict`, ``extra``, and the state of each process's random generator. A stage
    that two ranks hold is written once; of its buffers those of one holder.

    Args:
        path: a folder; a new one for every checkpoint, as one that is overwritten is no checkpoint while it is.
        pipe: whose model.
        optimizer: one or several, of `pipe.parameters()`.
        extra: what else the script needs to go on, the same on every rank: the number of the step, the state of a
            learning-rate scheduler. Anything that can be pickled.
        asynchronous: return when all is copied, and write in the background.
        group: the processes that save together; all of them unless given. Replicas of a pipeline save together.

    Returns:
        None; or a future whose ``result()`` says that the checkpoint is complete, or raises what went wrong.

    Raises:
        ValueError: for an optimizer of other parameters, or whose state cannot be saved, and on every rank when some
            give one and others none.
        StepError: when another rank cannot save, or dies meanwhile.
        RuntimeError: when the last one in the background failed, and nobody has asked its future.
    """
    optimizers = _listed(optimizer)
    state: dict[str, Any] = {}
    folder, alone = os.fspath(path), not dist.is_initialized()

    def gather() -> Reply:
        _await_pending()
        names = {id(parameter): name for name, parameter in pipe.named_parameters()}
        # a tuple is one value to DCP, whatever is in it
        state.update(model=pipe.state_dict(), extra=(extra,), random=_generators(pipe), steps=(pipe.step_count,))
        state.update(optimizer=flat_state(optimizers, names))
        return {"optimizes": _optimizes(pipe, optimizers)}

    def write(replies: Sequence[Reply]) -> None:
        _check_all_optimize(replies)
        if not asynchronous:
            pipe._steps.attend(lambda: save(state, checkpoint_id=folder, process_group=group, no_dist=alone))

    pipe._steps.meet(f"save_checkpoint of {folder}", gather, write)
    if not asynchronous:
        return None
    writing = async_save(state, checkpoint_id=folder, process_group=_side_group(group), no_dist=alone)
    assert isinstance(writing, Future)
    _pending.append(_Writing(folder))
    writing.add_done_callback(_pending[-1].settle)
    return _pending[-1]


def load_checkpoint(
    path: str | os.PathLike[str],
    pipe: Pipeline,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    *,
    group: Any = None,
) -> Any:
    """Read what `save_checkpoint` wrote, whatever wrote it: another number of ranks, another schedule.

    Called on every rank alike. Parameters are filled in place, and `Pipeline.step_count` is set. Random generators are
    set where as many processes load as had saved; otherwise they stay as they are. With ``rng="per_microbatch"`` random
    numbers go on in any case, if `torch.manual_seed` was called as when it was saved.

    A checkpoint is trusted like code: `torch.distributed.checkpoint` reads its metadata with pickle. Load only what you
    or somebody you trust has written.

    Args:
        path: the folder.
        pipe: a pipeline of the same model.
        optimizer: one or several, of `pipe.parameters()`, as when it was saved; None leaves what was saved.
        group: the processes that load together; all of them unless given.

    Returns:
        What was given as ``extra``; None for a checkpoint that another program has written.

    Raises:
        FileNotFoundError: when there is no complete checkpoint.
        KeyError: when it lacks something that is needed here.
        ValueError: when it has something of the model that no rank takes, another shape, or other groups of
            parameters, and when some ranks give an optimizer and others none.
        StepError: when another rank cannot load.
    """
    optimizers = _listed(optimizer)
    names = {id(parameter): name for name, parameter in pipe.named_parameters()}
    state: dict[str, Any] = {}
    saved: dict[str, Any] = {}

    def prepare() -> Reply:
        _await_pending()
        saved.update(_metadata(path))
        state.update(model=pipe.state_dict())
        state.update({name: None for name in ("extra", "steps") if name in saved})  # not where the plain model saved
        _check_model(state["model"], saved, path)
        state.update(optimizer=template(optimizers, names, _section(saved, "optimizer")))
        generators = _generators(pipe)
        state.update(random={key: value for key, value in generators.items() if f"random.{key}" in saved})
        return {"keys": list(state["model"]), "optimizes": _optimizes(pipe, optimizers)}

    def read(replies: Sequence[Reply]) -> None:
        _check_all_optimize(replies)
        _check_all_taken(_section(saved, "model"), replies, path)
        alone = not dist.is_initialized()
        pipe._steps.attend(lambda: load(state, checkpoint_id=os.fspath(path), process_group=group, no_dist=alone))

    pipe._steps.meet(f"load_checkpoint of {os.fspath(path)}", prepare, read)
    pipe.load_state_dict(state["model"])
    put_back(optimizers, names, state["optimizer"])
    _set_generators(pipe, state["random"])
    if "steps" in state:
        (pipe.step_count,) = state["steps"]
    return state["extra"][0] if "extra" in state else None


def _listed(optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None) -> Optimizers:
    if optimizer is None:
        return []
    if isinstance(optimizer, torch.optim.Optimizer):
        return [optimizer]
    if not isinstance(optimizer, Sequence) or not all(isinstance(one, torch.optim.Optimizer) for one in optimizer):
        raise TypeError(f"optimizer is a {type(optimizer).__name__}: give a torch optimizer, or a list of them")
    return list(optimizer)


def _optimizes(pipe: Pipeline, optimizers: Optimizers) -> bool | None:
    """Whether this rank gives an optimizer; None for one that has nothing to optimize."""
    trains = any(parameter.requires_grad for parameter in pipe.parameters())
    return bool(optimizers) if trains or optimizers else None


def _check_all_optimize(replies: Sequence[Reply]) -> None:
    given = [reply["optimizes"] for reply in replies]
    if True in given and False in given:
        raise ValueError(
            f"optimizer: rank {given.index(True)} gives one and rank {given.index(False)} gives none; give it on every "
            "rank, or on none"
        )


def _metadata(path: str | os.PathLike[str]) -> Mapping[str, Any]:
    """What is in a checkpoint, by key."""
    folder = os.fspath(path)
    try:
        found = FileSystemReader(path).read_metadata()
    except FileNotFoundError as error:
        there = os.path.isdir(folder)
        what = "this folder has no complete checkpoint" if there else "there is no such folder"
        raise FileNotFoundError(f"path = {folder!r}: {what}; give one that save_checkpoint has filled") from error
    entries: Mapping[str, Any] = found.state_dict_metadata
    return entries


def _section(saved: Mapping[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{name}."
    return {key.removeprefix(prefix): entry for key, entry in saved.items() if key.startswith(prefix)}


def _check_model(state: Mapping[str, Any], saved: Mapping[str, Any], path: str | os.PathLike[str]) -> None:
    for key, value in state.items():
        entry = saved.get(f"model.{key}")
        if entry is None:
            raise KeyError(f"the checkpoint {os.fspath(path)} has no {key!r}, which the pipeline needs")
        shape = tuple(value.shape) if isinstance(value, torch.Tensor) else None
        there = tuple(entry.size) if isinstance(entry, TensorStorageMetadata) else None
        if shape != there:
            raise ValueError(f"{key} has shape {shape} here and {there} in the checkpoint {os.fspath(path)}")


def _check_all_taken(saved: Mapping[str, Any], replies: Sequence[Reply], path: str | os.PathLike[str]) -> None:
    left = saved.keys() - {key for reply in replies for key in reply["keys"]}
    if left:
        raise ValueError(
            f"the checkpoint {os.fspath(path)} has {min(left)!r} ({len(left)} such keys), which no stage has: build "
            "the pipeline of the same model"
        )


def _generators(pipe: Pipeline) -> dict[str, torch.Tensor]:
    """The states of this process's random generators."""
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
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


def _side_group(group: Any) -> Any:
    """A group of the same processes for saves in the background: the script goes on to use the other one."""
    if not dist.is_initialized():
        return None
    group = dist.group.WORLD if group is None else group
    if group not in _side_groups:
        _side_groups[group] = registered_group(group, "gloo", default_pg_timeout)
    return _side_groups[group]


def _await_pending() -> None:
    """What was saved in the background is complete, or failed.

    Raises:
        RuntimeError: when it failed, and nobody has asked its future.
    """
    while _pending:
        writing = _pending.pop()
        was_read = writing.is_read
        if (error := writing.exception()) is not None and not was_read:
            raise RuntimeError(f"the checkpoint {writing.folder} was not saved: {cause_text(error)}") from error
