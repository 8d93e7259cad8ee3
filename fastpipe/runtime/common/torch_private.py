"""All uses of private names of torch and Linux.

A name is private if it begins with an underscore, or is an undocumented attribute. `PRIVATE` lists them with their use,
and what does not work without them; all were seen in torch 2.11 and 2.13. `missing` checks each, and `fastpipe doctor`
reports the result. Nearly all are looked up on use, so that fastpipe imports under a torch without one, and only the
features that need it fail. (C++ has ``csrc/torch/torch_private.h``.)

Names with a public alternative are not used. There is none to tell which backward runs in a thread or what a checkpoint
recomputes, to reduce a bucket of DDP or a gradient of FSDP at a given time, or to create a registered process group by
its members only.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import importlib
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import fx, nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import saved_tensors_hooks
from torch.utils import _python_dispatch, _pytree, checkpoint

# Trees. `torch.utils` has no public module for them.

pytree = _pytree


def fake_tensor_mode() -> Any:
    """A mode for tensors with shapes and without values; it also accepts real tensors."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


# Modules. The public functions build names, skip None and duplicates, or check their arguments.

MEMBERS = frozenset({"_parameters", "_modules"})
"""The attributes that hold a module's parameters and children."""

OWN_STATE = MEMBERS | {"_buffers", "_non_persistent_buffers_set", "_compiled_call_impl"}
"""Attributes that a copy which follows another module does not share with it."""


def parameters_of(module: nn.Module) -> dict[str, nn.Parameter | None]:
    """A module's own parameters by name: the dict itself, which may be changed in place."""
    return module._parameters


def buffers_of(module: nn.Module) -> dict[str, torch.Tensor | None]:
    """A module's own buffers by name; not a dict in a scripted module."""
    return module._buffers


def children_of(module: nn.Module) -> dict[str, nn.Module | None]:
    """A module's children by name: the dict itself."""
    return module._modules


def set_children(module: nn.Module, children: dict[str, nn.Module | None]) -> None:
    """Replace a module's dict of children."""
    module._modules = children


def share_tensors(module: nn.Module, source: nn.Module) -> None:
    """Share the parameters and buffers of another module, also those added later."""
    module._parameters = source._parameters
    share_buffers(module, source)


def share_buffers(module: nn.Module, source: nn.Module) -> None:
    """Share the buffers of another module, also those added later."""
    module._buffers = source._buffers
    module._non_persistent_buffers_set = source._non_persistent_buffers_set


def has_hooks(module: nn.Module) -> bool:
    """Whether calling it, or its backward, runs hooks."""
    forward = module._forward_hooks or module._forward_pre_hooks
    return bool(forward or module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether `nn.Module.compile` was called."""
    return module._compiled_call_impl is not None


def never_compiled(function: Callable[..., Any]) -> Any:
    """Let torch.compile run a function, and what it calls, as they are; `torch.compiler.disable`, which imports the
    compiler already here."""
    disable = getattr(torch, "_disable_dynamo", None)
    return function if disable is None else disable(function)


def name_in_state(name: str) -> str:
    """A parameter's key in a state, without what torch's `checkpoint_wrapper` adds to its name."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import _CHECKPOINT_PREFIX

    return name.replace(_CHECKPOINT_PREFIX, "")


# Tensors.


def version_of(tensor: torch.Tensor) -> int:
    """The number of changes in place; 0 for tensors of inference mode, which have no counter."""
    return 0 if tensor.is_inference() else tensor._version


def address_of(tensor: torch.Tensor) -> int:
    """The address by which the extension identifies a tensor."""
    return int(tensor._cdata)


def hooks_of(tensor: torch.Tensor) -> Any:
    """The hooks of ``register_hook``; None if there are none."""
    return tensor._backward_hooks


def share_hooks(tensor: torch.Tensor, source: torch.Tensor) -> None:
    """Share the ``register_hook`` hooks of another tensor."""
    if tensor._backward_hooks is not source._backward_hooks:
        tensor._backward_hooks = source._backward_hooks


def post_hooks_of(tensor: torch.Tensor | None) -> list[Callable[[torch.Tensor], Any]]:
    """The hooks of ``register_post_accumulate_grad_hook``."""
    return list((getattr(tensor, "_post_accumulate_grad_hooks", None) or {}).values())


def grouped(tensors: Sequence[torch.Tensor]) -> list[tuple[torch.dtype, list[torch.Tensor], list[int]]]:
    """Tensors grouped by device and dtype, with their indices, in the order of ``clip_grad_norm_``."""
    from torch.utils._foreach_utils import _group_tensors_by_device_and_dtype

    found: Any = _group_tensors_by_device_and_dtype([list(tensors)], with_indices=True) if tensors else {}
    return [(dtype, group, places) for (_, dtype), ([group], places) in found.items()]


def norms(tensors: Sequence[torch.Tensor], order: float) -> Sequence[torch.Tensor]:
    """The norm of each tensor of a group, by the kernel of ``clip_grad_norm_``: bits depend on it."""
    return torch._foreach_norm(list(tensors), order)


# Autograd.


def graph_task() -> int:
    """The number of the backward that runs in this thread; -1 outside of one."""
    return int(torch._C._current_graph_task_id())


def sequence_number() -> int:
    """The number of autograd nodes that this thread has created."""
    return int(torch._C._autograd._get_sequence_nr())


def function_of(node: Any) -> type[torch.autograd.Function] | None:
    """The Python `autograd.Function` of a node; None for torch's own nodes."""
    return getattr(node, "_forward_cls", None)


def is_recomputing() -> bool:
    """Whether code in a backward runs in the recomputation of a checkpoint or other function, and not in a forward of
    its own.

    Reads the call stack; needed only where a forward and a backward are fused.
    """
    recomputes = {_unpack_code(), BackwardCFunction.apply.__code__}
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code in recomputes:
            return True
        frame = frame.f_back
    return False


@functools.cache
def _unpack_code() -> CodeType:
    """The code of the hook by which a checkpoint without reentrance recomputes saved tensors."""
    hook: Any = checkpoint._checkpoint_hook.__init__
    (found,) = (code for code in hook.__code__.co_consts if getattr(code, "co_name", "") == "unpack_hook")
    assert isinstance(found, CodeType)
    return found


def is_profiling() -> bool:
    """Whether a torch profiler runs; naming ranges without one costs microseconds."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def modes_of_thread() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """Saved-tensor hooks, function and dispatch modes of this thread.

    Returns:
        A context of them for another thread: they are pushed onto its stacks and not entered again.
    """
    # only the innermost of several hooks has effect; hooks of tracing are left out
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    functions = _overrides._get_current_function_mode_stack()
    dispatches = _dispatch._get_current_dispatch_mode_stack()

    @contextlib.contextmanager
    def applied() -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if hooks is not None:
                stack.enter_context(saved_tensors_hooks(*hooks))
            for mode in functions:
                _overrides._push_mode(mode)
                stack.callback(_overrides._pop_mode)
            for mode in dispatches:
                _dispatch._push_mode(mode)
                stack.callback(_dispatch._pop_mode, getattr(mode, "_mode_key", None))
            yield

    return applied


def check_shared_modes() -> None:
    """Refuse a mode of this thread that threads cannot share: it keeps what it records in one place, without a lock."""
    if any(isinstance(mode, _graph._CloneArgBeforeMutateMode) for mode in _dispatch._get_current_dispatch_mode_stack()):
        raise ValueError(
            "torch.autograd.graph.allow_mutation_on_saved_tensors() is active, and ranks that are threads cannot share "
            "it: gradients would be wrong; leave it out, or use one process for each rank"
        )


def keep_fake_guard() -> None:
    """Without a GPU, let this thread own what FakeTensorMode (of torch.compile) registers as the guard of CUDA devices.

    In torch 2.11 it belongs to the first thread that enters the mode, and its use after the end of that thread, such as
    a rank's, crashes the process.
    """
    if torch.version.cuda is not None and torch.cuda.device_count() == 0:
        getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()


@contextlib.contextmanager
def noted_in_thread(key: str, value: Any) -> Iterator[None]:
    """Note an object for this thread, and for the engine's threads that run backwards for it."""
    _note_in_thread(key, value)
    try:
        yield
    finally:
        _note_in_thread(key, None)


def _note_in_thread(key: str, value: Any) -> None:
    if _takes_references():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(value))
    torch._C._stash_obj_in_tls(key, value)


@functools.cache
def _takes_references() -> bool:
    """Whether torch takes a reference from the caller where it notes an object, instead of one of its own, as 2.11
    does: the object would be freed while it is used."""
    key, probe = "fastpipe.probe", object()
    before = sys.getrefcount(probe)
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(probe))
    torch._C._stash_obj_in_tls(key, probe)
    takes = sys.getrefcount(probe) == before + 1
    if not takes:
        ctypes.pythonapi.Py_DecRef(ctypes.py_object(probe))
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(None))
    torch._C._stash_obj_in_tls(key, None)
    return takes


def find_in_thread(key: str) -> Any:
    """What `noted_in_thread` noted; None if nothing."""
    return torch._C._get_obj_in_tls(key) if torch._C._is_key_in_tls(key) else None


# not typed
_overrides: Any = torch.overrides
_dispatch: Any = _python_dispatch
_graph: Any = torch.autograd.graph


# CUDA.


def end_allocations(device: torch.device, pool: Any) -> None:
    """End the allocator's recording after a failed capture.

    Raises:
        RuntimeError: if the allocator has ended it already.
    """
    torch._C._cuda_endAllocateToPool(device.index, pool)
    torch._C._cuda_releasePool(device.index, pool)


# Process groups.


def backend_for(group: Any, device: torch.device) -> Any:
    """The backend of a group for a device."""
    return group._get_backend(device)


def unregistered_group(store: Any, rank: int, size: int, backends: Mapping[torch.device, tuple[Any, Any]]) -> Any:
    """A group that is not registered with `torch.distributed`: it ends with its last reference.

    Args:
        backends: by device, the type of the backend and the backend.
    """
    group = dist.ProcessGroup(store, rank, size)
    for device, (kind, backend) in backends.items():
        group._register_backend(device, kind, backend)
    return group


def registered_group(ranks: Sequence[int], backend: str, name: str, timeout: timedelta) -> Any:
    """A registered group for torch's collectives, created by its members only, under a given name.

    `dist.new_group` must also be called by processes outside of the group; or, with ``use_local_synchronization``, it
    names the group by the number of groups of this process. If that differs between processes, they wait for each other
    forever.
    """
    c10d: Any = dist.distributed_c10d
    made, _ = c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        default_store(),
        c10d.GroupName(name),
        timeout=timeout,
        group_desc="fastpipe",
    )
    c10d._world.pg_group_ranks[made] = {process: rank for rank, process in enumerate(ranks)}
    return made


def default_store() -> Any:
    """The default group's store.

    Raises:
        RuntimeError: if the group was closed, as its processes are also replicas or a dimension of a mesh.
    """
    world: Any = dist.group.WORLD
    store: Any = None
    with contextlib.suppress(RuntimeError):  # of torch 2.14, which otherwise returns None
        store = world.get_group_store()
    if store is None:
        raise RuntimeError(
            "the default process group was closed after a failure; call destroy_process_group and init_process_group, "
            "make meshes and wrap stages again, or restart the processes"
        )
    return store


def set_timeout(options: Any, timeout: timedelta) -> None:
    """Set the timeout of NCCL options."""
    options._timeout = timeout


@contextlib.contextmanager
def bounded(groups: Iterable[Any], device: torch.device, seconds: float) -> Iterator[None]:
    """Context in which collectives of Gloo wait at most so many seconds, if their group's timeout is longer.

    No backend is held within it: a rank that leaves a group drops the last reference to it.
    """
    limit, before = timedelta(seconds=seconds), {}
    for group in groups if device.type == "cpu" else ():
        if (own := _gloo_timeout(group, None)) is not None and own > limit:
            before[group] = own
    try:
        for group in before:
            _gloo_timeout(group, limit)
        yield
    finally:
        for group, own in before.items():
            _gloo_timeout(group, own)


def _gloo_timeout(group: Any, new: timedelta | None) -> timedelta | None:
    """The timeout of a group's collectives on the CPU, and a new one; None if they are not Gloo's."""
    try:
        backend = group._get_backend(torch.device("cpu"))
    except RuntimeError:  # it has none, or this rank has left it
        return None
    if not dist.is_gloo_available() or not isinstance(backend, dist.ProcessGroupGloo):
        return None
    if new is not None:
        backend._set_default_timeout(new)
    found: timedelta = backend.options._timeout
    return found


@contextlib.contextmanager
def coalesced(group: Any, device: torch.device) -> Iterator[list[Any]]:
    """Run the sends and receives within this context as one operation; the list receives its work."""
    group._start_coalescing(device)
    work: list[Any] = []
    try:
        yield work
    finally:
        # also on failure: NCCL operations in an unfinished group, of any caller on this thread, never start
        work.append(group._end_coalescing(device))


# DistributedDataParallel. No public method returns the reducer's buckets, or averages one outside of a backward.

NOT_REDUCING = {"require_backward_grad_sync": False, "_static_graph_delay_allreduce_enqueued": True}
"""Flags of a wrapper with which no hook reduces, not even at the end of a static graph's first backward."""


def buckets_of(wrapper: Any) -> list[Any]:
    """New buckets of zeros, with the reducer's layout."""
    return list(wrapper.reducer._get_zeros_like_grad_buckets())


def run_comm_hook(wrapper: Any, bucket: Any) -> Any:
    """Average a bucket by the wrapper's communication hook, or as torch does without one; returns a future."""
    for hook, state in wrapper._comm_hooks:  # torch reads what another type points to
        future = hook(state, bucket)
        if not isinstance(future, torch._C.Future):
            raise TypeError(f"the communication hook returned a {type(future).__name__}: return a torch.futures.Future")
        return future
    return wrapper.reducer._run_comm_hook(bucket)


def has_comm_hook(wrapper: Any) -> bool:
    """Whether the user registered a communication hook."""
    return bool(wrapper._get_ddp_logging_data().get("comm_hook"))


def has_delayed_all_reduce(wrapper: Any) -> bool:
    """Whether it was created with ``delay_all_reduce_named_params``."""
    return bool(wrapper._delay_all_reduce_params)


def has_python_reducer(wrapper: Any) -> bool:
    """Whether gradients are reduced by the compiler's reducer."""
    return bool(wrapper._use_python_reducer)


def is_joined(wrapper: Any) -> bool:
    """Whether it was given to `torch.distributed.algorithms.Join` or its method ``join`` was called; torch never
    resets that."""
    return bool(wrapper._join_config.enable)


def sends_buffers(wrapper: Any) -> bool:
    """Whether its next forward would broadcast the first replica's buffers."""
    return bool(wrapper._check_sync_bufs_pre_fwd())


def has_buffer_hook(wrapper: Any) -> bool:
    """Whether it has a communication hook for buffers."""
    return hasattr(wrapper, "buffer_hook")


def sync_module(wrapper: Any) -> None:
    """Broadcast the first replica's parameters and buffers."""
    from torch.distributed.utils import _sync_module_states

    group, ignored, size = wrapper.process_group, wrapper.parameters_to_ignore, wrapper.broadcast_bucket_size
    _sync_module_states(wrapper.module, group, size, 0, ignored, wrapper.broadcast_buffers)


def renew_reducer(wrapper: Any) -> None:
    """Rebuild a wrapper's reducer for the parameters that are trainable now, as unpickling does.

    A new wrapper would need arguments that this one does not keep.
    """
    ignored = wrapper.parameters_to_ignore
    wrapper._module_parameters = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
    parameters, sparse = wrapper._build_params_for_reducer()
    names = wrapper._build_debug_param_to_name_mapping(parameters)
    wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
    if wrapper.static_graph:
        wrapper.reducer._set_static_graph()
        wrapper.logger._set_static_graph()
    wrapper._has_rebuilt_buckets = False


def is_composable_replicate(module: nn.Module) -> bool:
    """Whether ``replicate`` was applied to it. If its module is not imported, it was not."""
    replicate: Any = sys.modules.get("torch.distributed._composable.replicate")
    return replicate is not None and isinstance(module, replicate.DDP)


# FSDP2. torch.distributed.pipelining itself uses these names to reduce after the last backward: the public methods
# (`set_requires_gradient_sync` and the like) only affect a later backward.


def fsdp_states(modules: Iterable[Any]) -> list[Any]:
    """FSDP's states of modules with ``fully_shard``, outer before inner, each once."""
    return list(dict.fromkeys(module._get_fsdp_state() for module in modules))


def fsdp_groups(state: Any) -> list[Any]:
    """The parameter groups of one module; at most one in torch 2.11."""
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]


def fsdp_modules(state: Any) -> tuple[nn.Module, ...]:
    """The modules of one call of ``fully_shard``, which takes several as one group."""
    return tuple(state._modules)


def find_fsdp_roots(states: Iterable[Any]) -> None:
    """Make FSDP find its outermost modules, as the first forward does."""
    for state in states:
        if state._is_root is None:
            # the outermost is first and claims the inner ones
            state._lazy_init()


def is_collective_result(value: Any) -> bool:
    """Whether it is a tensor whose collective may still run, as tensor-parallel layers return; its clone() waits."""
    module = sys.modules.get(_COLLECTIVES)
    return module is not None and isinstance(value, module.AsyncCollectiveTensor)


def without_wait(tensor: torch.Tensor) -> torch.Tensor:
    """The memory into which such a collective writes; any other tensor itself."""
    return tensor.elem if is_collective_result(tensor) else tensor  # type: ignore[attr-defined]


def fsdp_contexts(states: Iterable[Any]) -> list[Any]:
    """What the modules of each outermost module share; its ``is_last_backward`` says whether a backward reduces."""
    return [state._state_ctx for state in states if state._is_root]


class _Gathering(dist.Work):
    """An all-gather, by its future and a function that waits for it."""

    def __init__(self, future: Any, wait: Callable[[Any], Any]) -> None:
        super().__init__()
        self._future, self._wait = future, wait

    def get_future(self) -> Any:
        return self._future

    def wait(self, timeout: timedelta = timedelta(0)) -> bool:
        self._wait(self._future)
        return True


def keep_future_of_gather(group: Any, wait: Callable[[Any], Any]) -> None:
    """Keep the future of a parameter group's all-gather, and how to wait for it, instead of its work: Gloo's work holds
    the connections of its process group, which a rank that leaves a mesh closes."""
    result = group._all_gather_result
    if result is not None and result.all_gather_work is not None:
        future = result.all_gather_work.get_future()
        group._all_gather_result = result._replace(all_gather_work=_Gathering(future, wait))


def fsdp_collectives(group: Any) -> list[tuple[Any, int]]:
    """The process groups in which `post_backward` of a parameter group reduces, in the order of the mesh's dimensions:
    of the shards, and of their replicas. Each with its number of collectives so far."""
    names = "shard_process_group", "replicate_process_group"
    found = [getattr(group.mesh_info, name, None) for name in names]
    return [(one, _num_collectives(one, group.device)) for one in found]


def _num_collectives(process_group: Any, device: torch.device) -> int:
    """Those of the backend for a device; -1 if there is no such group, or this process has left it."""
    try:
        return -1 if process_group is None else int(process_group._get_backend(device)._get_sequence_number_for_group())
    except RuntimeError:
        return -1


def join_fsdp_collective(group: Any, process_group: Any, before: int) -> None:
    """Send zeros in a collective of `post_backward` that has not begun since `fsdp_collectives`, if there is one."""
    trained = [p for p in group.fsdp_params if p.sharded_param.requires_grad]
    if not trained or before < 0 or _num_collectives(process_group, group.device) != before:
        return
    # the message of the other replicas has the shards of all gradients, with their padding
    length = sum(p._sharded_param_data.numel() for p in trained)
    dtype = trained[0].reduce_dtype or trained[0].param_dtype or trained[0].sharded_param.dtype
    zeros = torch.zeros(length, dtype=dtype, device=group.device)
    if process_group is getattr(group.mesh_info, "replicate_process_group", None):
        dist.all_reduce(zeros, group=process_group)
    elif process_group.size() > 1:
        reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor  # as torch names it
        reduce_scatter(zeros, zeros.repeat(process_group.size()), group=process_group)


def end_fsdp_backward(states: Iterable[Any]) -> None:
    """Wait for the gradients, as the outermost modules do at the end of a backward."""
    for state in states:
        if state._is_root:
            state._root_post_backward_final_callback()


def unsharded(parameter: Any) -> nn.Parameter | None:
    """The gathered parameter, once there has been one."""
    return getattr(parameter, "_unsharded_param", None)


# torch.distributed.pipelining.


def pipeline_stage_type() -> type | tuple[()]:
    """The type of torch's stages, for `isinstance`; no type if its module is not imported."""
    return getattr(sys.modules.get("torch.distributed.pipelining.stage"), "_PipelineStageBase", ())


def traced_model_type() -> type | tuple[()]:
    """The type of models traced by ``pipeline()`` of torch, for `isinstance`; no type if its module is not imported."""
    return getattr(sys.modules.get("torch.distributed.pipelining._IR"), "Pipe", ())


def module_of(graph: fx.Graph) -> nn.Module:
    """The module that runs a graph; of a traced model it has all stages."""
    module = graph.owning_module
    assert module is not None
    return module


# Linux.


def host_identity() -> str:
    """A name shared by the processes that see the same /proc; empty where there is none."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() + os.readlink("/proc/self/ns/pid") if boot.exists() else ""


MEMORY_FOLDER = "/dev/shm"
"""A tmpfs: files in memory, which outlive the processes. Linux has it by default; containers may make it small."""


def handles_signal(number: int) -> bool:
    """Whether this process ignores a signal or has a handler for it, also one that Python does not know of."""
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return True
    masks = [int(mask, 16) for name, mask in re.findall(r"^(SigIgn|SigCgt):\s*(\w+)", status, re.MULTILINE)]
    return not masks or any(mask >> (number - 1) & 1 for mask in masks)


def start_of_process(pid: int) -> str:
    """The start time of a process, as the kernel writes it; empty if unknown or if the process is gone."""
    with contextlib.suppress(OSError):
        # fields 3 to 52 follow the name, which may contain any character; this is field 22
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return ""


def process_descriptor(pid: int) -> int:
    """A descriptor that becomes readable when the process exits.

    Raises:
        ProcessLookupError: if the process is gone.
        OSError, AttributeError: if the kernel grants none: old kernels lack them, and sandboxes may deny them.
    """
    return os.pidfd_open(pid)


def line_of_thread(thread: int) -> str:
    """The line of Python that a thread executes; empty if there is no such thread."""
    frame = sys._current_frames().get(thread)
    return "" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_name}"


class Private(NamedTuple):
    """Private names of one owner.

    Attributes:
        owner: a module, a class, or a folder; or a function that creates an object to inspect.
        names: the names; ``a|b`` for either, ``f.<locals>.g`` for a nested function.
        use: what they are for.
        without: what does not work without them.
    """

    owner: str | Callable[[], Any]
    names: str
    use: str
    without: str


def _reentrant_node() -> Any:
    with torch.enable_grad():
        return checkpoint.checkpoint(torch.sin, torch.zeros((), requires_grad=True), use_reentrant=True).grad_fn


_C10D = "torch.distributed.distributed_c10d"
_DDP = "torch.nn.parallel.DistributedDataParallel"
_FSDP = "torch.distributed.fsdp._fully_shard"
_ALL = "the runtime"
_MESHES = "silent ranks in collectives of stages"
_SHARDED, _REPLICATED = "stages under fully_shard", "stages under DistributedDataParallel"
_NORM = "clip_grad_norm_"
_FUSED = "add_loss in modules with overlapped_forward_backward"
_COLLECTIVES = "torch.distributed._functional_collectives"
_GROUPS = "checkpoints in the background; backends that are neither Gloo nor NCCL"
_DEATHS = "shared memory between processes; exits on this host are detected by the lifeline instead"

PRIVATE = (
    Private(
        "torch.utils._pytree",
        "tree_flatten tree_flatten_with_path tree_unflatten tree_map tree_map_only tree_leaves tree_structure "
        "tree_is_leaf keystr is_namedtuple_class register_pytree_node SUPPORTED_NODES TreeSpec",
        "trees of tensors: inputs, outputs, and what crosses between stages",
        _ALL,
    ),
    Private(nn.Module, "_parameters _buffers _modules", "a module's members, to be swapped", _ALL),
    Private(nn.Module, "_non_persistent_buffers_set", "which of them its state leaves out", "split and traced models"),
    Private(nn.Module, "_forward_hooks _forward_pre_hooks _compiled_call_impl", "what a call does", "split models"),
    Private(nn.Module, "_backward_hooks _backward_pre_hooks", "hooks that no stage would call", "split models"),
    Private("torch", "_disable_dynamo", "what is not traced", "split models and all_to_all in compiled stages"),
    Private(
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "_CHECKPOINT_PREFIX",
        "names of parameters in checkpoint_wrapper",
        "checkpoints",
    ),
    Private("torch.Tensor", "_version", "changes in place", f"{_REPLICATED}, split, recomputation"),
    Private("torch.Tensor", "_cdata", "a parameter's address, for the extension", "replicas with a split backward"),
    Private(
        "torch.Tensor", "_backward_hooks", "a parameter's hooks, to be refused or shared", "tied weights, two routes"
    ),
    Private("torch.Tensor", "_post_accumulate_grad_hooks", "the same", "tied weights, two routes"),
    Private("torch.utils._foreach_utils", "_group_tensors_by_device_and_dtype", "the bits of torch's norms", _NORM),
    Private("torch", "_foreach_norm", "the bits of torch's norms", _NORM),
    Private("torch._subclasses.fake_tensor", "FakeTensorMode", "FLOPs without computing", "cuts by FLOPs"),
    Private("torch._C", "_ensureCUDADeviceGuardSet", "its lifetime", "compiled layers of torch 2.11 without a GPU"),
    Private("torch._C", "_current_graph_task_id", "which backward a thread runs", "add_loss"),
    Private(_reentrant_node, "_forward_cls", "the nodes of Python's functions", "random numbers"),
    Private("torch._C._autograd", "_get_sequence_nr", "nodes created by a recompute", "random numbers of stages"),
    Private("torch._C._autograd", "_top_saved_tensors_default_hooks", "hooks of saved tensors, in other threads", _ALL),
    Private(
        "torch.overrides", "_get_current_function_mode_stack _push_mode _pop_mode", "modes, in other threads", _ALL
    ),
    Private("torch._C", "_stash_obj_in_tls _get_obj_in_tls _is_key_in_tls", "the turns of a pair", "all_to_all"),
    Private("torch.utils._python_dispatch", "_get_current_dispatch_mode_stack _push_mode _pop_mode", "the same", _ALL),
    Private(
        "torch.autograd.graph", "_CloneArgBeforeMutateMode", "a mode that threads cannot share", "ranks as threads"
    ),
    Private(
        "torch._subclasses.fake_tensor.FakeTensorMode", "_mode_key", "a mode's place on the stack", "cuts by FLOPs"
    ),
    Private(
        "torch.utils.checkpoint",
        "_checkpoint_hook.__init__.<locals>.unpack_hook",
        "a recompute on the call stack",
        _FUSED,
    ),
    Private("torch.autograd.profiler", "_is_profiler_enabled", "whether to name actions", "the Python executor"),
    Private(_C10D, "_new_process_group_helper _world GroupName", "groups created by their members only", _GROUPS),
    Private(
        "torch.distributed.ProcessGroup",
        "get_group_store _register_backend _get_backend _start_coalescing _end_coalescing",
        "groups that end when they are dropped, and are aborted; two ways in one operation",
        "transports between processes",
    ),
    Private(
        "torch._C._distributed_c10d.Backend", "_get_sequence_number_for_group", "whether a collective began", _SHARDED
    ),
    Private(
        _DDP,
        "reducer logger process_group module device parameters_to_ignore broadcast_buffers broadcast_bucket_size "
        "static_graph mixed_precision require_backward_grad_sync require_forward_param_sync _module_parameters "
        "_static_graph_delay_allreduce_enqueued _has_rebuilt_buckets _get_ddp_logging_data _delay_all_reduce_params "
        "_use_python_reducer _join_config _check_sync_bufs_pre_fwd "
        "_build_params_for_reducer _build_debug_param_to_name_mapping _ddp_init_helper _comm_hooks",
        "averages once per step, outside of a backward; new parameters",
        _REPLICATED,
    ),
    Private("torch.distributed.Logger", "_set_static_graph", "a rebuilt reducer", _REPLICATED),
    Private(
        "torch.distributed.Reducer",
        "_get_zeros_like_grad_buckets _run_comm_hook _set_static_graph",
        "a bucket's average at any time",
        _REPLICATED,
    ),
    Private("torch.distributed.GradBucket", "buffer parameters", "the same", _REPLICATED),
    Private("torch.distributed.utils", "_sync_module_states", "new parameters", _REPLICATED),
    Private("torch.distributed._composable.replicate", "DDP", "replicate(), to be refused", "its refusal"),
    Private("torch.distributed.fsdp.FSDPModule", "_get_fsdp_state", "FSDP's state of a module", _SHARDED),
    Private(
        f"{_FSDP}._fsdp_state.FSDPState",
        "_fsdp_param_groups|_fsdp_param_group _modules _is_root _lazy_init _state_ctx "
        "_root_post_backward_final_callback",
        "gradients reduced once per step",
        _SHARDED,
    ),
    Private(f"{_FSDP}._fsdp_state.FSDPStateContext", "is_last_backward", "the same", _SHARDED),
    Private(
        f"{_FSDP}._fsdp_param_group.FSDPParamGroup",
        "post_forward_mesh_info reshard_after_backward reduce_grads all_reduce_grads fsdp_params mesh_info device "
        "unshard wait_for_unshard reshard post_backward gradient_divide_factor force_sum_reduction_for_comms "
        "_all_gather_result",
        "the same",
        _SHARDED,
    ),
    Private(
        f"{_FSDP}._fsdp_param.FSDPParam",
        "sharded_param _sharded_param_data _unsharded_param param_dtype reduce_dtype unsharded_accumulated_grad "
        "accumulate_unsharded_grad_if_needed to_accumulated_grad_if_needed",
        "gradients of gathered parameters",
        _SHARDED,
    ),
    Private(_COLLECTIVES, "AsyncCollectiveTensor", "outputs that are not complete", "tensor-parallel stages"),
    Private(f"{_COLLECTIVES}.AsyncCollectiveTensor", "elem", "bytes that stages hold", "profiles of such stages"),
    Private("torch.distributed.pipelining.stage", "_PipelineStageBase", "stages of torch's", "stages of torch's"),
    Private("torch.distributed.pipelining._IR", "Pipe", "traced models", "traced models"),
    Private(fx.Graph, "owning_module", "the other stages of a traced model", "stages built of a traced model"),
    Private("torch.distributed.ProcessGroupGloo", "_set_default_timeout", "when a stage's collective ends", _MESHES),
    Private("torch.distributed.ProcessGroupGloo._Options", "_timeout", "the same", _MESHES),
    Private("/proc", "self/stat self/ns/pid sys/kernel/random/boot_id", "which processes share a host", _DEATHS),
    Private("sys", "_current_frames", "where a slow rank is in Python", "reports of slow steps"),
    Private("os", "pidfd_open", "an exit wakes waiting ranks", _DEATHS),
)
CUDA = Private("torch._C", "_cuda_endAllocateToPool _cuda_releasePool", "a recording that failed", "cuda_graph=True")
NCCL = Private("torch.distributed.ProcessGroupNCCL.Options", "_timeout", "when NCCL gives up", "NCCL")


def private_names() -> list[Private]:
    """The names that this build of torch should have: not every build has CUDA and NCCL."""
    return [*PRIVATE, *([CUDA] if torch.version.cuda else []), *([NCCL] if dist.is_nccl_available() else [])]


def num_names() -> int:
    """The number of private names."""
    return sum(len(private.names.split()) for private in private_names())


def missing() -> dict[str, str]:
    """The missing private names, each with what does not work without it."""
    return {
        f"{_text(private.owner)}.{name}": private.without
        for private in private_names()
        for name in private.names.split()
        if not _has(private.owner, name)
    }


def _text(owner: Any) -> str:
    return owner if isinstance(owner, str) else getattr(owner, "__qualname__", owner.__name__)


def _has(owner: Any, name: str) -> bool:
    if isinstance(owner, str) and owner.startswith("/"):
        return Path(owner, name).exists()
    try:
        found = _resolve(owner) if isinstance(owner, str) else owner() if callable(owner) else owner
    except (ImportError, AttributeError):
        return False
    return any(_reaches(found, one) for one in name.split("|"))


def _resolve(path: str) -> Any:
    """A module, or an attribute of one."""
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        owner, _, name = path.rpartition(".")
        if not owner:
            raise
        return getattr(_resolve(owner), name)


def _reaches(owner: Any, path: str) -> bool:
    name, _, rest = path.partition(".")
    if name == "<locals>":
        code = getattr(owner, "__code__", None)
        return code is not None and any(getattr(inner, "co_name", "") == rest for inner in code.co_consts)
    if rest:
        return hasattr(owner, name) and _reaches(getattr(owner, name), rest)
    return hasattr(owner, name) or (isinstance(owner, type) and _sets(owner, name))


def _sets(owner: type, name: str) -> bool:
    """Whether instances of a class have an attribute, by annotations and the names in its methods."""
    methods = [method for kind in owner.__mro__ for method in vars(kind).values() if isinstance(method, FunctionType)]
    annotated = any(name in vars(kind).get("__annotations__", ()) for kind in owner.__mro__)
    return annotated or any(name in method.__code__.co_names for method in methods)
