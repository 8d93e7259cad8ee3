"""The unsplit model with tied weights whose uses are summed as a pipeline does it, for the reference."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import nn

from fastpipe.runtime.shared_weight import Places, Shared, Tie
from fastpipe.runtime.tied import parameter_of
from fastpipe.runtime.twins import Made, twin, with_parameters


@contextmanager
def uses_apart(model: nn.Module, ties: Sequence[Tie]) -> Iterator[None]:
    """Sum the uses of tied weights as a pipeline does: those of every stage by themselves, then the last stage's first.

    Raises:
        ValueError: when the model's weights are not tied, or have hooks.
    """
    children = dict(model._modules)
    try:
        _separate(model, ties)
        shared = [Shared(tie, _places_by_name(model, tie)) for tie in ties]
        for weight in shared:
            weight.check_hooks()
        with _aliases_in(shared):
            yield
    finally:
        model._modules.update(children)


def ties_in(model: nn.Module, ties: Sequence[Tie]) -> list[Tie]:
    """Those of a pipeline's ties whose uses can be told apart in the unsplit model, under its names.

    Where a function or a trace made the stages the model may lack the number of the stage in them; and a weight that
    one module uses several times has one name, so that autograd sums its uses in its own order.
    """
    known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    found = []
    for tie in ties:
        for names in (tie.names, tuple(name.partition(".")[2] for name in tie.names)):
            if len(set(names)) == len(names) and known.issuperset(names):
                found.append(Tie(names, tie.members))
                break
    return found


@contextmanager
def _aliases_in(shared: Sequence[Shared]) -> Iterator[None]:
    for weight in shared:
        weight.set_aside()
        weight.put_in()
    try:
        yield
    finally:
        for weight in shared:
            weight.add_up(weight.grads())
            weight.take_out()


def _separate(model: nn.Module, ties: Sequence[Tie]) -> None:
    """Layers of several stages share no module, as `own_modules` has it for those of a pipeline."""
    layers = {
        (stage, name.partition(".")[0]) for tie in ties for (stage, _), name in zip(tie.members, tie.names, strict=True)
    }
    seen: dict[int, set[int]] = {}
    made: dict[int, Made] = {}
    for stage, name in sorted(layers):
        layer = model.get_submodule(name)
        if any(earlier & with_parameters(layer) for other, earlier in seen.items() if other != stage):
            layer = model._modules[name] = twin(layer, made.setdefault(stage, {}))
        seen.setdefault(stage, set()).update(with_parameters(layer))


def _places_by_name(model: nn.Module, tie: Tie) -> dict[int, Places]:
    first = parameter_of(model, tie.names[0], tie.names[0])
    places: dict[int, Places] = {}
    for name, (stage, _) in zip(tie.names, tie.members, strict=True):
        if parameter_of(model, name, name) is not first:
            raise ValueError(f"model: {name} and {tie.names[0]} are one weight in the pipeline and not in the model")
        owner, _, attribute = name.rpartition(".")
        places.setdefault(stage, []).append((model.get_submodule(owner), attribute))
    return places
