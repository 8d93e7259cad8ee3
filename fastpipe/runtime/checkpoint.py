"""Checkpoints: a thin layer over `torch.distributed.checkpoint` (DCP).

Keys are those of the unsplit model, so a checkpoint does not know how the model was cut: any schedule, any number of
ranks and the plain model can load it. DCP does the rest: every rank writes what it holds, what several hold is
written once, and each reads what it needs. What is checked here first is agreed on by all ranks, as DCP's own
exchange would wait for a rank that raised.

The state of an optimizer goes by the names of its parameters, so that it survives another cut. The form is the
flattened one of `torch.distributed.checkpoint.state_dict`: ``"state.<name>.<key>"`` and
``"param_groups.<name>.<key>"``, hyperparameters once a parameter. How parameters are grouped may differ between
ranks.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.distributed_c10d import default_pg_timeout

from fastpipe.runtime.common import cause_text
from fastpipe.runtime.coordination import Reply
from fastpipe.runtime.pipeline import Pipeline
from fastpipe.runtime.transport import registered_group

Optimizers = Sequence[torch.optim.Optimizer]
Names = Mapping[int, str]
"""``id`` of a parameter to its name in the whole model."""

_GROUPS = "param_groups"
_LOCAL = ("params", "param_names")
"""What a group says of its parameters, which is another on every rank."""


def flat_state(optimizers: Optimizers, names: Names) -> dict[str, Any]:
    """The state of the optimizers.

    Raises:
        ValueError: for a parameter that is not the pipeline's, or a state that is neither tensor nor plain value.
    """
    flat: dict[str, Any] = {}
    for group, name, parameter, optimizer in _parameters(optimizers, names):
        values = {("state", key): value for key, value in optimizer.state.get(parameter, {}).items()}
        values |= {(_GROUPS, key): value for key, value in group.items() if key not in _LOCAL}
        for (section, key), value in values.items():
            if isinstance(value, Mapping | list) or not isinstance(key, str) or "." in key:
                raise ValueError(
                    f"optimizer: {section} of {name} has {key!r}, a {type(value).__name__}: what is saved are tensors "
                    "and plain values, under names without a dot"
                )
            flat[f"{section}.{name}.{key}"] = value
    return flat


def template(optimizers: Optimizers, names: Names, saved: Mapping[str, Any]) -> dict[str, Any]:
    """Empty places for what a checkpoint has of the optimizers' parameters.

    Args:
        optimizers: whose state is to be loaded.
        names: of their parameters.
        saved: the checkpoint's metadata by flattened key.

    Raises:
        KeyError: for a parameter that was not in an optimizer when the checkpoint was saved.
    """
    index = _by_parameter(saved)
    found: dict[str, Any] = {}
    for _, name, parameter, _ in _parameters(optimizers, names):
        if (_GROUPS, name) not in index:
            raise KeyError(f"the checkpoint has no state of an optimizer for {name!r}: it was saved without one")
        for section in ("state", _GROUPS):
            entries = index.get((section, name), {})
            found |= {f"{section}.{name}.{key}": _empty(parameter, entry) for key, entry in entries.items()}
    return found


def _by_parameter(flat: Mapping[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Section and name to what belongs to that parameter."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for path, value in flat.items():
        section, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        found.setdefault((section, name), {})[key] = value
    return found


def _empty(parameter: nn.Parameter, entry: Any) -> Any:
    if not isinstance(entry, TensorStorageMetadata):
        return None
    dtype = entry.properties.dtype
    if entry.size == parameter.shape:
        # spread over processes where the parameter is
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    return torch.empty(entry.size, dtype=dtype)


def put_back(optimizers: Optimizers, names: Names, flat: Mapping[str, Any]) -> None:
    """Give the optimizers a loaded state.

    Raises:
        ValueError: when parameters that are in one group now had other hyperparameters.
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


def _agreed(found: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The hyperparameters of one group, which are those of each of its parameters."""
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

    pipe._steps.all_gather(f"save_checkpoint of {folder}", gather, write)
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

    pipe._steps.all_gather(f"load_checkpoint of {os.fspath(path)}", prepare, read)
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
