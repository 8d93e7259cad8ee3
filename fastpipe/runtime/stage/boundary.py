"""Stage outputs as tensors, the only thing that a transport moves.

A tensor, or a tuple or list of distinct tensors, is sent as it is. Any other tree is flattened: its tensors follow a
*treespec*, a uint8 tensor with the structure and all other values as JSON. Values may change between microbatches, so
every message has its treespec. A first tensor that is one-dimensional uint8 marks a treespec, so an output that begins
with such a tensor is flattened, too.

A tensor that occurs twice in a tree is sent once and is one tensor after the boundary, as in the unsplit model: both
places see an in-place change, and the gradients of all uses accumulate in the same order. (One sum per place would
round differently.)

Of a DTensor the local shard is sent. Its dimensions, placements and shape are part of the structure, and the receiver
makes a DTensor of its own ranks in the same dimensions of the pipeline's mesh; autograd takes its gradient back alike.

Of a tensor that the receiving rank holds the key alone is sent, as part of the structure.

On a device with streams, reading a treespec blocks the host. So in a step that announces its shapes both ends cache
the treespecs without values. In other steps such a treespec must not change: the sender checks that, and the receiver
does not read it.

The JSON is data: it names no code to import or call. Classes are looked up among those already loaded, and only kinds
whose construction runs no code of their own: named tuples, enumerations, a few built-in types, and classes registered
with torch's pytree.

**What a rank with several stages holds**, it need not receive again. A tensor that stages pass on unchanged crosses to
a rank once, where a placement visits ranks several times. It has a key: the stage that made it, and its place in that
stage's message. A stage that returns a tensor that it received, not a copy and not changed in place, passes on the key.
A rank keeps what it passed on, and what it made beside its first output, until its next stage has had that microbatch.
So a sender knows from the placement what the receiver holds, and sends the key alone.

A gradient of a held tensor is summed on the rank, latest stage first, and added to that of the stage where the tensor
came in (or was made), whose backward is the rank's last. Autograd would sum the uses of all ranks in one order, so this
rounds differently, and is done only if the user asks for it. Tensors without a gradient are always sent once.
"""

from __future__ import annotations

import base64
import enum
import functools
import json
import struct
import sys
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from fastpipe.placement import Placement
from fastpipe.runtime.common import Tensors, handed_over, is_block_mask, is_dtensor, pytree, torch_private, version_of
from fastpipe.runtime.model import as_arguments

_FACTORIES = (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)


def to_data(value: Any) -> Any:
    """Encode a value for `json`; numbers of one kind have a fixed length.

    Raises:
        TypeError: for an unsupported type.
    """
    if value is None or type(value) in (bool, str):
        return value
    name = _name_of_kind(value)
    return [name, _KINDS[name][1](value)]


def from_data(data: Any) -> Any:
    """Decode the result of `to_data`; ValueError for other data or a class that is not loaded."""
    if data is None or isinstance(data, bool | str):
        return data
    name, given = data
    if name not in _KINDS:
        raise ValueError(f"{name!r} is not an encoded kind")
    return _KINDS[name][2](given)


def _name_of_kind(value: Any) -> str:
    kind = type(value)
    if kind is int and not -(2**63) <= value < 2**63:
        return "long"
    if isinstance(value, type | enum.Enum):
        return "class" if isinstance(value, type) else "enum"
    if kind not in _NAMES:
        raise TypeError(f"a {kind.__name__} cannot be encoded")
    return _NAMES[kind]


_Kind = tuple[Any, Callable[[Any], Any], Callable[[Any], Any]]
"""Type, encoder, decoder."""


def _number(kind: Any, layout: str, parts: Callable[[Any], tuple[Any, ...]]) -> _Kind:
    return (
        kind,
        lambda value: struct.pack(layout, *parts(value)).hex(),
        lambda given: kind(*struct.unpack(layout, bytes.fromhex(given))),
    )


def _sequence(kind: Any) -> _Kind:
    return kind, lambda value: list(map(to_data, value)), lambda given: kind(map(from_data, given))


def _steps(kind: Any) -> _Kind:
    return (
        kind,
        lambda value: list(map(to_data, (value.start, value.stop, value.step))),
        lambda given: kind(*map(from_data, given)),
    )


def _of_torch(kind: Any) -> _Kind:
    def read(name: str) -> Any:
        found = getattr(torch, name, None)
        if type(found) is not kind:
            raise ValueError(f"torch.{name} is no {kind.__name__}")
        return found

    return kind, lambda value: str(value).removeprefix("torch."), read


def _member(given: Any) -> Any:
    found = _class(*given[0])
    if not issubclass(found, enum.Enum):
        raise ValueError(f"{found.__name__} is no enumeration")
    return found[given[1]]


def _name(kind: type) -> list[str]:
    name = [kind.__module__, kind.__qualname__]
    try:
        found = _class(*name)
    except ValueError as error:
        raise TypeError(str(error)) from None
    if found is not kind:
        raise TypeError(f"there is another class of the name {'.'.join(name)}")
    return name


@functools.lru_cache(maxsize=256)
def _class(module: str, name: str) -> type:
    """A loaded class that may be constructed from data; ValueError if there is none."""
    found: Any = sys.modules.get(module)
    for part in name.split("."):
        found = getattr(found, part, None)
    is_allowed = isinstance(found, type) and (
        found in _FACTORIES or issubclass(found, enum.Enum) or pytree.is_namedtuple_class(found)
    )
    if not is_allowed:
        # a class defined in a function is not an attribute of its module
        nodes = [k for k in reversed(pytree.SUPPORTED_NODES) if (k.__module__, k.__qualname__) == (module, name)]
        if not nodes:
            raise ValueError(f"no class {module}.{name} is registered with torch.utils._pytree in this process")
        found = nodes[0]
    made: type = found
    return made


_KINDS: dict[str, _Kind] = {
    "int": _number(int, "<q", lambda value: (value,)),
    "long": (None, str, int),
    "float": _number(float, "<d", lambda value: (value,)),
    "complex": _number(complex, "<dd", lambda value: (value.real, value.imag)),
    "bytes": (bytes, lambda value: base64.b64encode(value).decode(), base64.b64decode),
    "dict": (
        dict,
        lambda value: [[to_data(key), to_data(item)] for key, item in value.items()],
        lambda given: {from_data(key): from_data(item) for key, item in given},
    ),
    **{kind.__name__: _sequence(kind) for kind in (list, tuple, set, frozenset, torch.Size)},
    **{kind.__name__: _steps(kind) for kind in (slice, range)},
    **{kind.__name__: _of_torch(kind) for kind in (torch.dtype, torch.layout, torch.memory_format)},
    "device": (torch.device, str, torch.device),
    "class": (None, _name, lambda given: _class(*given)),
    "enum": (None, lambda value: [_name(type(value)), value.name], _member),
}
_NAMES = {kind: name for name, (kind, _, _) in _KINDS.items() if kind is not None}


_TREESPEC_BYTES = 256
"""Treespecs are padded to a multiple of this, so that a slightly longer one still has the announced size."""

_TENSOR, _NONE, _VALUE, _SPREAD = "tnvd"
_END = b"\n"
"""Separates structure and values."""
_NO_VALUES = b"[]"


def treespec_tensor(text: bytes) -> torch.Tensor:
    """A treespec as a tensor on the host."""
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


def treespec_text(treespec: torch.Tensor) -> bytes:
    """The text of a treespec; blocks the host if it is on a device."""
    return treespec.cpu().numpy().tobytes()


def to_tensors(
    value: Any,
    carried: Mapping[str, Any],
    stage: int,
    make: Callable[[bytes], torch.Tensor] = treespec_tensor,
    mesh: Any = None,
    received: ReceivedTensors | None = None,
) -> Tensors:
    """The tensors of a stage's output and carried values.

    Args:
        carried: values for later stages, by name.
        make: from the text of a treespec to its tensor.
        received: those of the stage's forward, where ranks hold tensors for several stages.

    Raises:
        ValueError: for a tree that cannot be encoded; names the stage.
    """
    if not carried:
        if not _is_simple(value):
            value = _complete(value)
        if _is_simple(value) and not _is_treespec(value):
            return (value,)
        if type(value) in (tuple, list) and _is_plain(value) and (received is None or received.made(value)):
            return tuple(value) if received is None else received.send(value)[0]
    leaves, structure = pytree.tree_flatten((as_arguments(value), dict(carried)), is_leaf=_is_one_value)
    kinds = "".join(map(_kind, leaves))
    found = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    known = (_is_simple, is_dtensor, torch_private.is_collective_result)
    if subclass := next((type(t).__name__ for t in found if not any(is_known(t) for is_known in known)), None):
        raise ValueError(
            f"stage {stage} returned a {subclass}, a subclass of Tensor that would arrive as a plain tensor: "
            "return tensor.as_subclass(torch.Tensor), or the tensors that it holds, and make it again where it is used"
        )
    tensors = {id(tensor): tensor for tensor in found}
    order = {key: place for place, key in enumerate(tensors)}
    places = tuple(order[id(tensor)] for tensor in found)
    values = [leaf for leaf, kind in zip(leaves, kinds, strict=True) if kind == _VALUE]
    spreads = tuple(_spread(leaf, mesh, stage) for leaf in found if is_dtensor(leaf))
    sent = tuple(map(_local, tensors.values()))
    sent, keys = (sent, ()) if received is None else received.send(sent)
    try:
        text = (
            _structure_text(structure, kinds, places, keys, spreads)
            + _END
            + _json([to_data(value) for value in values])
        )
    except (TypeError, ValueError) as error:
        names = ", ".join(sorted({type(v).__name__ for v in values if type(v) not in _NAMES}))
        if any(map(is_block_mask, values)):
            raise ValueError(
                f"stage {stage} returned or carries a BlockMask, whose mask_mod is a function and cannot be sent: give "
                "the mask to step by keyword, as every stage whose forward names it gets it, or make it in each stage"
            ) from error
        raise ValueError(
            f"stage {stage} returned a {names or 'tree'} that cannot be sent to the next stage ({error}): return "
            "tensors, None, numbers, text, and tuples, lists or dicts of them; or register its class by "
            "torch.utils._pytree.register_dataclass or register_pytree_node"
        ) from error
    return make(_padded(text)), *sent


def from_tensors(
    tensors: Tensors,
    read: Callable[[torch.Tensor], bytes] = treespec_text,
    mesh: Any = None,
    received: ReceivedTensors | None = None,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional arguments of a stage and the carried values; ``read`` gives the text of a treespec."""
    if not tensors or not _is_treespec(tensors[0]):
        return (tensors if received is None else received.receive(tensors)), {}
    described, _, found = read(tensors[0]).partition(_END)
    structure, kinds, places, keys, spreads = _structure(described)
    tensors = tensors[1:] if received is None else received.receive(tensors[1:], keys)
    given: dict[str, Iterator[Any]] = {
        _TENSOR: (tensors[place] for place, spread in zip(places, spreads, strict=True) if spread is None),
        _SPREAD: _rebuilt(tensors, places, spreads, mesh),
        _VALUE: map(from_data, () if found.startswith(_NO_VALUES) else json.loads(found)),
    }
    leaves = [None if kind == _NONE else next(given[kind]) for kind in kinds]
    args, carried = pytree.tree_unflatten(leaves, structure)
    return args, carried


def _is_one_value(tree: Any) -> bool:
    """Whether pytree would take it apart: it makes a tuple of a torch.Size."""
    return isinstance(tree, torch.Size) or is_block_mask(tree)


def _is_treespec(tensor: torch.Tensor) -> bool:
    return tensor.dtype is torch.uint8 and tensor.dim() == 1


def _is_plain(values: Any) -> bool:
    """Whether these are distinct tensors of which the first does not look like a treespec."""
    if not all(map(_is_simple, values)):
        return False
    return not (values and _is_treespec(values[0])) and len(set(map(id, values))) == len(values)


def _local(tensor: Any) -> Any:
    """A DTensor's shard, or any other tensor itself; differentiable."""
    return _complete(tensor.to_local() if is_dtensor(tensor) else tensor)


def _complete(value: Any) -> Any:
    """The value; of a collective that may still run, its result."""
    return value.clone() if torch_private.is_collective_result(value) else value


def _is_simple(tensor: Any) -> bool:
    """Whether it is a tensor of elements alone; what a subclass holds or does, as a MaskedTensor, would be lost."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter)


def _kind(leaf: Any) -> str:
    if isinstance(leaf, torch.Tensor):
        return _SPREAD if is_dtensor(leaf) else _TENSOR
    return _NONE if leaf is None else _VALUE


Spread = tuple[tuple[str, ...], tuple[int | None, ...], tuple[int, ...], tuple[int, ...]]
"""Of a DTensor: the dimensions of its mesh, for each the dimension that it shards or None, shape and strides."""


def _spread(tensor: Any, mesh: Any, stage: int) -> Spread:
    from torch.distributed.tensor import Replicate, Shard

    names = tensor.device_mesh.mesh_dim_names or ()
    others = set() if mesh is None else {*mesh.mesh_dim_names} - {"pp"}
    if not names or not others.issuperset(names):
        raise ValueError(
            f"stage {stage} returned a DTensor over the dimensions {names}: pass a mesh that has them to "
            "Pipeline(mesh=), or return tensor.to_local()"
        )
    for placement in tensor.placements:
        # exactly these: a Partial has another gradient, and other kinds of shards have more to say
        if type(placement) not in (Shard, Replicate):
            raise ValueError(
                f"stage {stage} returned a DTensor with the placement {placement}: redistribute it to Shard or "
                "Replicate"
            )
    dims = tuple(placement.dim if isinstance(placement, Shard) else None for placement in tensor.placements)
    return tuple(names), dims, tuple(tensor.shape), tuple(tensor.stride())


def _rebuilt(
    tensors: Tensors, places: tuple[int, ...], spreads: tuple[Spread | None, ...], mesh: Any
) -> Iterator[torch.Tensor]:
    made: dict[int, torch.Tensor] = {}
    for place, spread in zip(places, spreads, strict=True):
        if spread is None:
            continue
        from torch.distributed.tensor import DTensor, Replicate, Shard

        if place not in made:
            names, dims, shape, stride = spread
            placements = [Replicate() if dim is None else Shard(dim) for dim in dims]
            local, part = tensors[place], _part(mesh, names)
            made[place] = DTensor.from_local(
                local, part, placements, run_check=False, shape=torch.Size(shape), stride=stride
            )
        yield made[place]


@functools.lru_cache(maxsize=64)
def _part(mesh: Any, names: tuple[str, ...]) -> Any:
    return mesh[names]


def _json(data: Any) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode()


def _padded(text: bytes) -> bytes:
    return text.ljust(-(-len(text) // _TREESPEC_BYTES) * _TREESPEC_BYTES)


@functools.lru_cache(maxsize=256)
def _structure_text(
    structure: pytree.TreeSpec,
    kinds: str,
    places: tuple[int, ...],
    keys: tuple[Sent, ...],
    spreads: tuple[Spread | None, ...],
) -> bytes:
    return _json([_shape(structure), kinds, places, keys, *spreads])


def _shape(structure: pytree.TreeSpec) -> Any:
    """Torch's own serialization supports only classes registered under a name."""
    if structure.is_leaf():
        return None
    children = list(map(_shape, structure.children()))
    # named tuples have this function as type and their class as context
    kind = None if structure.type is namedtuple else to_data(structure.type)
    return [kind, to_data(structure.context), children]


@functools.lru_cache(maxsize=256)
def _structure(
    text: bytes,
) -> tuple[pytree.TreeSpec, str, tuple[int, ...], tuple[Sent, ...], tuple[Spread | None, ...]]:
    shape, kinds, places, keys, *spreads = json.loads(text)
    found: Iterator[Any] = iter([tuple(map(tuple, spread)) for spread in spreads])
    in_order = [kind for kind in kinds if kind in (_TENSOR, _SPREAD)]
    sent = tuple((made, place, held) for made, place, held in keys)
    return _spec(shape), kinds, tuple(places), sent, tuple(next(found) if k == _SPREAD else None for k in in_order)


def _spec(shape: Any) -> pytree.TreeSpec:
    if shape is None:
        return pytree.tree_structure(None)
    kind, context, children = shape
    made = namedtuple if kind is None else from_data(kind)
    return pytree.TreeSpec(made, from_data(context), list(map(_spec, children)))


class TreespecCache:
    """The treespecs that one stage, on one device, sends and receives.

    A tensor is made on the stage's stream, which waits for whoever sends it, so its memory can be reused there. It
    stays until its signature is announced again, which also ends the recorded steps that send it.
    """

    def __init__(self, stage: int, device: torch.device) -> None:
        self.stage = stage
        self.device = device
        # by microbatch: texts sent, with their tensors on the device, and texts received
        self._sent: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._received: dict[int, bytes] = {}
        # both, by signature
        self._known: dict[int, tuple[dict[int, tuple[bytes, torch.Tensor]], dict[int, bytes]]] = {}
        self._announcing = True

    def begin(self, signature: int, announce: bool) -> None:
        """Select the entries of a signature; a step that announces clears them."""
        self._announcing = announce
        if announce:
            self._known.pop(signature, None)
        self._sent, self._received = self._known.setdefault(signature, ({}, {}))

    def make(self, microbatch: int, text: bytes) -> torch.Tensor:
        """The tensor of a treespec to send; ValueError if it differs from the announced one."""
        announced, treespec = (text, None) if self._announcing else self._sent.get(microbatch, (text, None))
        if announced != text:
            raise ValueError(
                f"stage {self.stage} returned another tree for microbatch {microbatch} than in the first step with "
                "inputs of these shapes; let its structure depend only on the shapes of the step's inputs"
            )
        if treespec is None:
            treespec = treespec_tensor(text).to(self.device)
            if self._announcing and _END + _NO_VALUES in text:
                self._sent[microbatch] = text, treespec
        return treespec

    def read(self, microbatch: int, treespec: torch.Tensor) -> bytes:
        """The text of a received treespec."""
        if not self._announcing and microbatch in self._received:
            return self._received[microbatch]
        text = treespec_text(treespec)
        if self._announcing and _END + _NO_VALUES in text:
            self._received[microbatch] = text
        return text


Key = tuple[int, int]
"""The stage that made a tensor, and the tensor's place in its message."""

Sent = tuple[int, int, bool]
"""A key, and whether the receiver holds the tensor."""


def _read_here(tensor: torch.Tensor) -> torch.Tensor:
    """The same tensor, whose memory is not reused before the current stream has read it.

    It was made on another stage's stream, and that has finished: the message from there says so.
    """
    if tensor.device.type != "cpu":
        tensor.record_stream(torch.accelerator.current_stream(tensor.device))
    return tensor


class _Entry(torch.autograd.Function):
    """Entry of a received tensor into a graph; adds its gradient, with autograd's own layout, to those of a key.

    The gradient of a leaf would get the layout of the leaf, which changes what the previous stage computes.
    """

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, grads: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
        ctx.grads, ctx.key = grads, key
        # not a view: a stage may change its input in place
        return tensor.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[None, None, None]:
        before = ctx.grads.get(ctx.key)
        ctx.grads[ctx.key] = grads[0] if before is None else _read_here(before) + grads[0]
        return None, None, None


def enter(tensor: torch.Tensor, grads: dict[Any, torch.Tensor], key: Any) -> torch.Tensor:
    """A received tensor as an input of the stage; its gradient is added to ``grads[key]``."""
    entered: torch.Tensor = _Entry.apply(tensor, grads, key)  # type: ignore[no-untyped-call]
    return entered


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, output: torch.Tensor, grads: dict[Any, torch.Tensor], keys: list[Any], *others: torch.Tensor
    ) -> torch.Tensor:
        ctx.grads, ctx.keys = grads, keys
        # not a view, which could not be changed in place
        return output.detach()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        found = [ctx.grads.pop(key, None) for key in ctx.keys]
        return grads[0], None, None, *(None if grad is None else _read_here(grad) for grad in found)


def deliver(output: torch.Tensor, others: dict[Any, torch.Tensor], grads: dict[Any, torch.Tensor]) -> torch.Tensor:
    """The same output; its backward also gives other tensors the gradients that a dict then has for their keys."""
    made: torch.Tensor = _Deliver.apply(output, grads, list(others), *others.values())  # type: ignore[no-untyped-call]
    return made


class HeldTensors:
    """What one rank holds, by microbatch.

    Args:
        route: the rank of every stage.
        with_gradient: whether tensors that require a gradient are sent once, too.
    """

    def __init__(self, route: Sequence[int], with_gradient: bool) -> None:
        self.route = route
        self.with_gradient = with_gradient
        self.tensors: dict[int, dict[Key, torch.Tensor]] = {}
        self.grads: dict[int, dict[Key, torch.Tensor]] = {}

    def next_holds(self, key: Key, stage: int) -> bool:
        """Whether the rank of the next stage holds a tensor that a stage returns."""
        made, place = key
        following = self.route[stage + 1]
        # within a rank nothing is sent; of its first output, most often a new hidden state, a rank keeps nothing
        return following != self.route[stage] and following in self.route[made + (place == 0) : stage + 1]

    def clear(self) -> None:
        """Drop everything."""
        self.tensors.clear()
        self.grads.clear()


def held_tensors(placement: Placement, with_gradient: bool) -> HeldTensors | None:
    """For one rank; None if no rank has several stages of one route."""
    route = placement.routes[0]
    if placement.num_routes > 1 or len(set(route)) == len(route):
        return None
    return HeldTensors(route, with_gradient)


class ReceivedTensors:
    """One forward: the tensors that a stage received, and their keys."""

    def __init__(self, held: HeldTensors, stage: int, microbatch: int) -> None:
        self.stage = stage
        self._held = held
        self._microbatch = microbatch
        self._known: dict[int, tuple[Key, torch.Tensor, tuple[int, bool]]] = {}
        self._from_held: set[Key] = set()

    def receive(self, sent: Tensors, keys: Sequence[Sent] | None = None) -> Tensors:
        """The tensors of a message. Without ``keys`` all are sent, and new."""
        kept = self._held.tensors.pop(self._microbatch, {})
        if keys is None:
            for place, tensor in enumerate(sent):
                self._note((self.stage - 1, place), tensor)
            return sent
        arrived = iter(sent)
        return tuple(
            self._from_kept((made, place), kept) if held else self._note((made, place), next(arrived))
            for made, place, held in keys
        )

    def _from_kept(self, key: Key, kept: dict[Key, torch.Tensor]) -> torch.Tensor:
        tensor = _read_here(kept[key])
        self._from_held.add(key)
        if tensor.requires_grad and torch.is_grad_enabled():
            tensor = enter(tensor, self._grads(), key)
        return self._note(key, tensor)

    def _note(self, key: Key, tensor: torch.Tensor) -> torch.Tensor:
        # inference tensors do not count changes in place
        if not tensor.is_inference():
            self._known[id(tensor)] = key, tensor, (version_of(tensor), tensor.requires_grad)
        return tensor

    def _grads(self) -> dict[Key, torch.Tensor]:
        return self._held.grads.setdefault(self._microbatch, {})

    def made(self, outputs: Sequence[torch.Tensor]) -> bool:
        """Whether the stage made all of these tensors, so that their keys need not be sent."""
        return all(self._key(tensor, place) == (self.stage, place) for place, tensor in enumerate(outputs))

    def send(self, outputs: Sequence[torch.Tensor]) -> tuple[Tensors, tuple[Sent, ...]]:
        """The tensors to send of a stage's outputs, and the keys of all; keeps those that may come back."""
        keys = [self._key(tensor, place) for place, tensor in enumerate(outputs)]
        held = [self._held.next_holds(key, self.stage) for key in keys]
        has_root = any(t.requires_grad and not is_held for t, is_held in zip(outputs, held, strict=True))
        if not (self._held.with_gradient and has_root):  # else the backward has no root
            held = [is_held and not t.requires_grad for t, is_held in zip(outputs, held, strict=True)]
        sent = [tensor for tensor, is_held in zip(outputs, held, strict=True) if not is_held]
        route = self._held.route
        if route[self.stage] in route[self.stage + 1 :]:  # the rank has a later stage
            sent = self._keep(dict(zip(keys, outputs, strict=True)), sent)
        return tuple(sent), tuple((*key, is_held) for key, is_held in zip(keys, held, strict=True))

    def _key(self, tensor: torch.Tensor, place: int) -> Key:
        known = self._known.get(id(tensor))
        if known is None or known[2] != (version_of(tensor), tensor.requires_grad):
            return self.stage, place
        return known[0]

    def _keep(self, outputs: dict[Key, torch.Tensor], sent: list[torch.Tensor]) -> list[torch.Tensor]:
        kept = {
            key: tensor
            for key, tensor in outputs.items()
            if key != (self.stage, 0) and (self._held.with_gradient or not tensor.requires_grad)
        }
        self._held.tensors[self._microbatch] = dict(zip(kept, handed_over(tuple(kept.values())), strict=True))
        summed = {key: t for key, t in kept.items() if t.requires_grad and key not in self._from_held}
        if summed:
            place = next(place for place, tensor in enumerate(sent) if tensor.requires_grad)
            sent[place] = deliver(sent[place], summed, self._grads())
        return sent
