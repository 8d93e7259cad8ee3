"""Stages with fully_shard (FSDP2): parameters are gathered and gradients reduced once per step.

By default FSDP reduces at the end of every backward. For a split backward that is the end of I, and gradients from W
would never be reduced. During a step its flags say that no backward is the last, so gradients accumulate in the
unsharded parameters; REDUCE_GRAD calls `post_backward` of every parameter group, in the order of a backward.
"""

from __future__ import annotations

import contextlib
import sys
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from fastpipe.runtime.common import Failure, FailureError, cause_text, listed, parameters_of, torch_private, walked
from fastpipe.runtime.data_parallel.interface import DataParallel, raised_by_collective

_MODES = "eval_step", "step within no_sync", "step"
"""What a replica may have been called for, by the number that it announces."""

_HELD_BACK = {
    "post_forward_mesh_info": None,
    "reshard_after_backward": False,
    "reduce_grads": False,
    "all_reduce_grads": False,
}
"""The settings of a parameter group during a step; the user's are restored at its end."""


def _set(group: Any, flags: Mapping[str, Any]) -> None:
    for name, value in flags.items():
        setattr(group, name, value)


def is_sharded(module: nn.Module) -> bool:
    """Whether `fully_shard` was applied to it. If its module is not imported, it was not."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


class Sharded(DataParallel):
    """Every replica has a shard of the stage's parameters.

    Args:
        modules: the modules with `fully_shard`, outer before inner.
    """

    whole_gradients = False

    def __init__(self, modules: Sequence[Any], stage: int) -> None:
        self.wrapped = modules
        self.stage = stage
        self._states = torch_private.fsdp_states(modules)
        self._groups = [group for state in self._states for group in torch_private.fsdp_groups(state)]
        """The parameter groups, which are gathered and reduced together."""
        if not self._groups:
            raise ValueError(f"stages: stage {stage} has fully_shard and no parameters; leave fully_shard out there")
        self._parameters = [parameter for group in self._groups for parameter in group.fsdp_params]
        self._check_groups()
        meshes = dict.fromkeys(group.mesh_info.mesh for group in self._groups)
        self.device: torch.device = self._groups[0].device
        self.groups = [mesh.get_group(dim) for mesh in meshes for dim in range(mesh.ndim)]
        self.num_replicas = max(int(mesh.size()) for mesh in meshes)
        self.description = f"sharded by fully_shard over {self.num_replicas} replicas"
        self._mode = 0
        self._announced: torch.Tensor | None = None
        self._announcing: Any = None
        self._why: str | None = None  # the result of `_why_not_alike`; None until it is known
        self._unused: dict[Any, bool] = {}
        """FSDP's objects of parameters without a gradient here, and whether their shards have one of earlier steps."""
        is_host = self.device.type == "cpu"
        # a stream of its own, so that reading what was announced does not wait for the step's kernels
        self._aside: Any = contextlib.nullcontext() if is_host else torch.Stream(device=self.device)
        self._flags: list[tuple[Any, dict[str, Any]]] = []
        self._last: list[tuple[Any, bool]] = []
        self._known = {module: set(parameters_of(module)) for module in self._inner()}

    def averages(self) -> list[list[int]]:
        """As `DataParallel.averages`, also along dimensions that shard a DTensor already; without groups whose sum the
        user divides."""
        averaged = [group.fsdp_params[0] for group in self._groups if group.gradient_divide_factor is None]
        return [sorted(parameter.sharded_param.device_mesh.mesh.flatten().tolist()) for parameter in averaged]

    def _check_groups(self) -> None:
        """Refuse groups of modules that FSDP cannot run in this stage: it needs one that is around all of a group."""
        for members in map(torch_private.fsdp_modules, self._states):
            around = (set(module.modules()) for module in self.wrapped if module not in members)
            if len(members) > 1 and not any(inner.issuperset(members) for inner in around):
                kinds = [type(member).__name__.removeprefix("FSDP") for member in members]
                raise ValueError(
                    f"stages: in stage {self.stage}, fully_shard has {kinds} as one group, which needs a module with "
                    "fully_shard around all of them: apply it to each module by itself, or to the stage as a whole, too"
                )

    def _inner(self) -> list[nn.Module]:
        """All sharded modules and their submodules."""
        return list(dict.fromkeys(inner for module in self.wrapped for inner in walked(module)))

    def unreduced(self) -> list[str]:
        """An empty list: `fully_shard` cannot cover parameters later.

        Raises:
            ValueError: for trainable parameters in new places.
        """
        found = [
            (module, name)
            for module in self._inner()
            for name, parameter in parameters_of(module).items()
            if name not in self._known.get(module, ()) and parameter is not None and parameter.requires_grad
        ]
        if found:
            names = [f"{name} of a {type(module).__name__}" for module, name in found]
            raise ValueError(
                f"stages: stage {self.stage} has trainable parameters that it did not have when the Pipeline was "
                f"built, {listed(names)}, which fully_shard does not cover; apply it to the new layers, and build a "
                "new Pipeline"
            )
        return []

    def prepare(self) -> None:
        """Find the outermost modules, as the first forward does, and use of collectives only what Gloo has."""
        torch_private.find_fsdp_roots(self._states)
        for group in self._groups:
            if self.device.type == "cpu" and group.gradient_divide_factor is not None:
                group.force_sum_reduction_for_comms = True  # Gloo does not multiply what it sums

    def begin(self, reduces: bool, num_microbatches: int, timeout: float) -> None:
        """Mark no backward as the last one, and reshard only when the schedule says so."""
        super().begin(reduces, num_microbatches, timeout)
        self._mode = 2 if reduces else int(torch.is_grad_enabled())
        self._announced = self._why = None
        self._unused = {}
        self._last = [(context, context.is_last_backward) for context in torch_private.fsdp_contexts(self._states)]
        self._flags = [(group, {name: getattr(group, name) for name in _HELD_BACK}) for group in self._groups]
        for context, _ in self._last:
            context.is_last_backward = False
        for group, _ in self._flags:
            _set(group, _HELD_BACK)

    def unshard(self) -> None:
        """Start to gather the parameters; the forward, or the backward, waits for them.

        Raises:
            RuntimeError: if a group is broken; the others have begun, as replicas wait in them.
        """
        if self._announced is None and self.groups[0] not in self.broken:
            trained = self._trained()
            marks = [*self.marks(), self._mode, self._mode**2, trained, trained**2]
            with self._aside:
                self._announced = torch.tensor(marks, dtype=torch.int64, device=self.device)
                work = dist.all_reduce(self._announced, group=self.groups[0], async_op=True)
                # Gloo's work holds its connections, which a rank that leaves a mesh closes
                self._announcing = work.get_future()
        for group in self._groups:
            processes = torch_private.fsdp_collectives(group)[0][0]
            if processes not in self.broken:
                group.unshard(async_op=True)
                if self.device.type == "cpu":
                    torch_private.keep_future_of_gather(group, partial(self._wait_for_gather, processes))
        for group in self.lost():
            raise RuntimeError(self.broken[group])

    def _wait_for_gather(self, processes: Any, future: Any) -> None:
        self.wait(future, time.monotonic() + self.timeout, processes)

    def _why_not_alike(self) -> str:
        """The error if the replicas were not called alike, empty if they were; the same in all of them.

        They tell each other with a step's first UNSHARD. So none reduces where another does not, which would wait.
        """
        if self._announced is None:
            return ""
        if self._why is None:
            with self._aside:
                announcing, self._announcing = self._announcing, None
                self._collect(announcing)
                self._why = self._compared(*self._announced.tolist())
        return self._why

    def _trained(self) -> int:
        """A digest of which parameters are trained in this step, of 24 bits, so that sums of squares fit."""
        flags = bytes(parameter.sharded_param.requires_grad for parameter in self._parameters)
        return zlib.crc32(flags) >> 8 if self._mode else 0

    def _compared(
        self, count: int, total: int, squares: int, modes: int, mode_squares: int, trained: int, trained_squares: int
    ) -> str:
        if count * mode_squares != modes**2:
            return (
                f"the replicas of stage {self.stage}, in the processes {self.processes()}, were not called alike, here "
                f"for {_MODES[self._mode]}; with fully_shard call step, eval_step and no_sync alike in all of them"
            )
        if count * trained_squares != trained**2:
            inner_first = (named for module in reversed(self.wrapped) for named in module.named_parameters())
            frozen = {parameter: name for name, parameter in inner_first if not parameter.requires_grad}
            return (
                f"the replicas of stage {self.stage}, in the processes {self.processes()}, do not train the same "
                f"parameters (frozen here: {listed(frozen.values())}); call requires_grad_() alike in all of them"
            )
        return self.why_not_same(count, total, squares)

    def _collect(self, announcing: Any) -> None:
        for group in self.groups:
            try:
                if group is self.groups[0]:
                    self.wait(announcing, time.monotonic() + self.timeout, group)
                elif group not in self.broken:
                    dist.all_reduce(self._announced, group=group)
            except RuntimeError as error:  # sums without this replica; it does not reduce in that group
                self.lose(group, error)
                assert self._announced is not None
                self._announced.zero_()

    def reshard(self) -> None:
        """Free the gathered parameters; gradients stay."""
        for group in self._groups:
            group.wait_for_unshard()
            group.reshard()

    @property
    def folds(self) -> bool:
        """Whether gradients are summed in another dtype than they are computed in."""
        return any(parameter.reduce_dtype is not None for parameter in self._parameters)

    def fold(self) -> None:
        """Add a microbatch's gradients in the dtype of the sum."""
        for group in self._groups:
            _fold(group)

    def reduce_grad(self, failed: bool) -> None:
        """Start to reduce, the group of the last layers first, as a backward does."""
        if not self._reduces or self._begun or self._why_not_alike():
            return
        self._begun = True
        # last in, first out; all of them, also if one raises, as replicas wait in each
        try:
            with contextlib.ExitStack() as stack:
                for group, flags in self._flags:
                    stack.callback(self._reduce, group, flags)
        except RuntimeError as error:
            if len(self.groups) == 1 and raised_by_collective(error):  # of several it is not known which
                self.lose(self.groups[0], error)
            raise

    def _reduce(self, group: Any, flags: Mapping[str, Any]) -> None:
        before = torch_private.fsdp_collectives(group)
        try:
            if cause := next((self.broken[processes] for processes, _ in before if processes in self.broken), ""):
                raise RuntimeError(cause)
            group.wait_for_unshard()
            _set(group, flags)
            if flags["reduce_grads"]:
                self._unused |= _complete(group)
            _fold(group)
            group.post_backward()
        except Exception as error:  # raised again
            # the other replicas wait; if the mesh's first dimension has lost one, those of the second wait all the same
            reduces, averages = flags["reduce_grads"], flags["all_reduce_grads"]
            joins = reduces and not raised_by_collective(error), reduces and averages
            for (processes, num_begun), is_joined in zip(before, joins, strict=True):
                if is_joined and processes not in self.broken:
                    self._join(group, processes, num_begun)
            raise

    def _join(self, group: Any, processes: Any, num_begun: int) -> None:
        try:
            torch_private.join_fsdp_collective(group, processes, num_begun)
        except RuntimeError as error:
            if raised_by_collective(error):
                self.lose(processes, error)
            else:
                self.broken[processes] = f"this replica could not reduce its gradients: {cause_text(error)}"

    def finish(self, failure: str | None, deadline: float) -> None:
        """Wait for the shards' gradients, and leave the parameters sharded, as between steps."""
        ends_alike = self._begun or (self._mode == 1 and self._announced is not None)
        self._begun = False
        try:
            self._end_backward()
        except Exception as error:  # when the other replicas, which wait, know of it
            failure = failure or cause_text(error)
            raise FailureError(Failure(None, cause_text(error), is_fatal=True)) from error
        finally:
            if cause := self._why_not_alike():
                if failure is None:
                    raise FailureError(Failure(None, cause))
            elif ends_alike:
                # steps that only accumulate do not wait for their kernels
                with contextlib.nullcontext() if self._reduces else self._aside:
                    self._compare(failure, deadline)

    def _end_backward(self) -> None:
        for context, _ in self._last:
            context.is_last_backward = True
        torch_private.end_fsdp_backward(self._states)
        for group, flags in self._flags:
            group.wait_for_unshard()
            group.reshard()  # whatever the user's setting: an optimizer's step would not change gathered parameters
            _set(group, flags)
        for context, last in self._last:
            context.is_last_backward = last

    def _compare(self, failure: str | None, deadline: float) -> None:
        """Raise unless all replicas completed the step; drop zeros of parameters that none of them has used."""
        reduced = self._parameters if self._reduces else []
        used = [int(parameter not in self._unused) for parameter in reduced]
        sums = torch.tensor([int(failure is not None), 0, *used], dtype=torch.int64, device=self.device)
        for group in self.groups:
            before = sums.clone()
            if not self.completes(deadline, dist.all_reduce, sums, group=group):
                sums = before
                sums += 1  # so that the other dimension's pipelines end, too: this one's are closed
        num_failed, num_broken, *num_used = sums.tolist()
        for parameter, number in zip(reduced, num_used, strict=True):
            if not number and not self._unused[parameter]:
                parameter.sharded_param.grad = None
        cause = ""
        if num_failed and len(self.lost()) < len(self.groups):
            cause = self.explained(
                "the step failed in another of the replicas that share this stage", failure, deadline
            )
        if num_broken or (cause and failure is None):
            cause = next((self.broken[group] for group in self.lost()), cause)
            raise FailureError(Failure(None, cause, is_fatal=bool(num_broken)))

    def forget(self) -> None:
        """Drop the gradients of gathered parameters, which a step without a reduction has left there."""
        if self._mode:
            self.put_aside()

    def _of(self, parameter: nn.Parameter) -> Any:
        """FSDP's object of a shard."""
        return next((known for known in self._parameters if known.sharded_param is parameter), None)

    def leaf(self, parameter: nn.Parameter) -> torch.Tensor:
        """The gathered parameter, which the forward uses."""
        found = torch_private.unsharded(self._of(parameter))
        return parameter if found is None else found

    def whole_gradient(self, parameter: nn.Parameter) -> torch.Tensor | None:
        """The gradient of the gathered parameter."""
        known = self._of(parameter)
        if known is None:
            return parameter.grad
        waiting: torch.Tensor | None = known.unsharded_accumulated_grad
        return self.leaf(parameter).grad if waiting is None else waiting

    def put_aside(self) -> Callable[[], None]:
        """Save the gradients of gathered parameters."""
        leaves = [leaf for leaf in map(torch_private.unsharded, self._parameters) if leaf is not None]
        waiting = [(p, "unsharded_accumulated_grad", p.unsharded_accumulated_grad) for p in self._parameters]
        kept = [*waiting, *((leaf, "grad", leaf.grad) for leaf in leaves)]
        for owner, name, _ in kept:
            setattr(owner, name, None)

        def put_back() -> None:
            for parameter in self._parameters:
                if (leaf := torch_private.unsharded(parameter)) is not None:
                    # created since, without a saved gradient
                    leaf.grad = None
            for owner, name, value in kept:
                setattr(owner, name, value)

        return put_back


def _complete(group: Any) -> dict[Any, bool]:
    """Fill missing gradients with zeros: the replicas' messages must have the same gradients at the same places.

    Returns:
        The parameters without a gradient, and whether their shards have one of earlier steps.
    """
    unused = {}
    for parameter in group.fsdp_params:
        leaf = torch_private.unsharded(parameter)
        assert leaf is not None
        if leaf.grad is None and parameter.unsharded_accumulated_grad is None:
            unused[parameter] = parameter.sharded_param.grad is not None
            if leaf.requires_grad:
                leaf.grad = torch.zeros_like(leaf)
    return unused


def _fold(group: Any) -> None:
    """Add gradients in the dtype of the sum."""
    for parameter in group.fsdp_params:
        if torch_private.unsharded(parameter) is not None:
            parameter.accumulate_unsharded_grad_if_needed()
            parameter.to_accumulated_grad_if_needed()
