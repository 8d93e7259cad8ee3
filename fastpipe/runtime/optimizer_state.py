"""The state of an optimizer by the names of its parameters, so that it survives another cut of the model.

The form is the flattened one of `torch.distributed.checkpoint.state_dict`: ``"state.<name>.<key>"`` and
``"param_groups.<name>.<key>"``, hyperparameters once a parameter. Whoever holds a parameter finds what belongs to it,
and how parameters are grouped may be another on every rank.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

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
