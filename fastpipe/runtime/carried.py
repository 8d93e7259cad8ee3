"""carry: what a layer gives, beside its output, to every later layer that names it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch.utils import _pytree as pytree


@dataclass(eq=False)
class Carried:
    """An output, and values for later layers by name; made by `carry`.

    Attributes:
        output: what the next layer gets.
        values: what every later layer gets whose forward names it.
    """

    output: Any
    values: dict[str, Any] = field(default_factory=dict)


# what looks into outputs, hooks of FSDP say, has to find the tensors
pytree.register_pytree_node(
    Carried,
    lambda carried: ([carried.output, carried.values], None),
    lambda children, context: Carried(*children),
    serialized_type_name="fastpipe.Carried",
)


def carry(output: Any, /, **values: Any) -> Carried:
    """Return this from a layer's forward to give values to later layers, however far behind it they are.

    Every later layer whose ``forward`` names a value gets it as a keyword argument, in the same stage and in others;
    the layers between need not know of it. So does a ``loss_fn`` that has a keyword-only parameter of that name, or a
    further one without a default. Gradients come back the same way. Within a pipeline a value travels as far
    as the last stage that names it.

    Args:
        output: what the layer hands to the next one, as if it were returned by itself.
        values: by name, anything that may cross a boundary: trees of tensors, None, numbers. A name that is carried
            already gets the new value from here on.
    """
    if not values:
        raise ValueError("carry: there is nothing to carry; give values by name, or return the output by itself")
    return Carried(output, values)


def as_arguments(value: Any) -> tuple[Any, ...]:
    """What a layer returned, as the next one's positional arguments: a tuple or a list gives several.

    A NamedTuple, a dict or any other object is one argument.
    """
    return tuple(value) if type(value) in (tuple, list) else (value,)


def apart(value: Any) -> tuple[Any, Mapping[str, Any]]:
    """What a layer returned: its output, and what it carries."""
    return (value.output, value.values) if isinstance(value, Carried) else (value, {})


def carried_on(
    carried: Mapping[str, Any],
    values: Mapping[str, Any],
    stage: int,
    own: frozenset[str] | None,
    later: frozenset[str] | None,
) -> dict[str, Any]:
    """What travels on after a stage.

    Args:
        carried: what came to it.
        values: what its own layers carry.
        stage: which one.
        own: the names that its layers, or its loss, take; None for any.
        later: the names that later stages take; None for any.

    Raises:
        ValueError: for a value of its own that no layer takes.
    """
    for name in values:
        if later is not None and name not in later and own is not None and name not in own:
            raise ValueError(
                f"carry: stage {stage} carries {name!r}, and no later layer's forward names it; name it there, or "
                "leave it out"
            )
    return {name: value for name, value in {**carried, **values}.items() if later is None or name in later}


def together(given: Mapping[str, Any], named: Mapping[str, Any], stage: int) -> Mapping[str, Any]:
    """A stage's keyword arguments: those of the step, and those that are carried to it.

    Raises:
        ValueError: when a name is among both.
    """
    both = sorted(given.keys() & named.keys())
    if both:
        raise ValueError(
            f"{both[0]}: it was given to step, and a layer before stage {stage} carries a value of this name; "
            "rename one of them"
        )
    return {**given, **named}


class Taker(Protocol):
    """A stage, as far as names are concerned.

    Attributes:
        index: its place.
        takes: the names that it takes; None for any.
        later: those that later stages take; None for any.
    """

    index: int
    later: frozenset[str] | None

    @property
    def takes(self) -> frozenset[str] | None:
        """See above."""
        ...


def names_message(stages: Iterable[Taker]) -> dict[str, list[str] | None]:
    """Which names the local stages take, for the other processes."""
    return {str(stage.index): None if stage.takes is None else sorted(stage.takes) for stage in stages}


def tell_later(stages: Iterable[Taker], messages: Sequence[Mapping[str, list[str] | None]]) -> None:
    """Tell the local stages what is taken behind them."""
    for stage in stages:
        stage.later = names_later(messages, stage.index)


def names_later(messages: Sequence[Mapping[str, list[str] | None]], stage: int) -> frozenset[str] | None:
    """What the stages after one take; None for any."""
    found = [names for message in messages for index, names in message.items() if int(index) > stage]
    return None if None in found else frozenset(name for names in found if names is not None for name in names)
