"""Stages in DistributedDataParallel: buckets are averaged once per step, by the wrapper's communication hook.

DDP's reducer expects one hook call per parameter, in the backward that it is prepared for. A pipeline has no such
backward: a stage's last I and last W may have other actions between them. And the end of that backward would wait for
the averages while gradients for other ranks are still unsent. So the reducer is never prepared. Buckets with its layout
are reduced in the background, in order, through the communication hook.

A bucket may start within the stage's last backward, once its parameters and those of earlier buckets have gradients. If
a gradient changes afterwards, the bucket started too early; this is checked when all gradients are complete. One small
message lists the buckets to average again, the parameters that have a gradient, and whether the step failed. The
remaining buckets are reduced at REDUCE_GRAD.

On CPUs the user's communication hooks run after the program, one bucket at a time. A hook such as PowerSGD's starts
further collectives when its first one is complete, which over Gloo is at another time in each replica: with two buckets
in progress, also of different stages, the replicas would add up parts of different buckets.

The reducer covers the parameters that were trainable at its creation. Every step checks whether layers were unfrozen,
exchanged or appended since. If so, and if all replicas have the same parameters, the reducer is rebuilt, as in
unpickling: the wrapper stays the same object, with its settings.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.common import (
    Failure,
    FailureError,
    bytes_of,
    cause_text,
    current_stream,
    grad_dtype_of,
    has_grad_dtype,
    listed,
    parameters_of,
    torch_private,
    version_of,
    walked,
    zero_grad_of,
)
from fastpipe.runtime.data_parallel.interface import DataParallel, same_text, wait_for


class Average:
    """The average of one step.

    Args:
        in_place: maps a parameter of the reducer to the one in use.

    Attributes:
        error: what the user's communication hook raised after its collective, if anything.
        in_turn: whether each bucket waits for the one before.
        buckets: the reducer's; tensors if gradients have another dtype than their parameters, as the reducer's do not.

    By `finish`, from the reports of all replicas:

        num_failed: number of replicas in which the step failed.
        num_skipping: number of those that failed only because their pipeline has parameters without a reducer.
        num_missing: number of replicas with such parameters in this wrapper.
        marks: the sums of `DataParallel.marks`.
        again: whether any replica had to average a bucket again.
    """

    def __init__(self, wrapper: Any, in_place: Callable[[nn.Parameter], nn.Parameter]) -> None:
        self.wrapper = wrapper
        self.buckets: list[Any] = torch_private.buckets_of(wrapper)
        self.parameters = [[in_place(parameter) for parameter in bucket.parameters()] for bucket in self.buckets]
        if any(map(has_grad_dtype, wrapper.module.parameters())):
            self.buckets = [
                torch.zeros(sum(p.numel() for p in own), dtype=grad_dtype_of(own[0]), device=own[0].device)
                for own in self.parameters
            ]
        self._has_hook = torch_private.has_comm_hook(wrapper)
        self.in_turn = self._has_hook and self._buffer(0).device.type == "cpu"
        self._failed = False
        # as the reducer: a hook gets unscaled gradients, without a hook they are divided and then summed
        self.factor = 1.0 if self._has_hook else 1.0 / len(dist.get_process_group_ranks(wrapper.process_group))
        self.error: Exception | None = None
        self._futures: list[Any] = []
        self._used: list[list[tuple[torch.Tensor | None, int]]] = []
        self._missing: list[int] = []
        self._hooks: list[Any] = []
        self._streams: set[torch.Stream] = set()  # of a device, on which the backward has added gradients

    def watch(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """Start every bucket once it is complete; called at the start of the last backward.

        Args:
            comes: whether this backward adds to a parameter's gradient; those of the others are complete.
        """
        self._missing = [0] * len(self.buckets)
        for number, parameters in enumerate(self.parameters):
            for parameter in parameters:
                if parameter.requires_grad and comes(parameter):
                    self._missing[number] += 1
                    hook = partial(self._on_gradient, number)
                    self._hooks.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        self._start_complete()

    def _on_gradient(self, number: int, parameter: torch.Tensor) -> None:
        if (stream := current_stream(parameter.device)) is not None:
            self._streams.add(stream)
        self._missing[number] -= 1
        self._start_complete()

    def _start_complete(self) -> None:
        # in order, whichever is complete first: the order must be the same on every replica
        while len(self._futures) < len(self.buckets) and self._missing[len(self._futures)] <= 0:
            self._start(failed=False)

    def _start(self, *, failed: bool) -> None:
        number = len(self._futures)
        if not failed:
            self._fill(number)
        self._used.append(self._grads(number))
        self._futures.append(self._run(self.buckets[number]))

    def _run(self, bucket: Any) -> Any:
        if not isinstance(bucket, torch.Tensor):
            return torch_private.run_comm_hook(self.wrapper, bucket)
        return dist.all_reduce(bucket, group=self.wrapper.process_group, async_op=True).get_future()

    def _buffer(self, number: int) -> torch.Tensor:
        bucket = self.buckets[number]
        return bucket if isinstance(bucket, torch.Tensor) else bucket.buffer()

    def _views(self, number: int, buffer: torch.Tensor) -> list[torch.Tensor]:
        """Each parameter's part of a bucket's buffer, in its shape."""
        parameters = self.parameters[number]
        parts = torch.split(buffer, [parameter.numel() for parameter in parameters])
        return [part.view(p.shape) for part, p in zip(parts, parameters, strict=True)]

    def _fill(self, number: int) -> None:
        # a tied weight's alias has another stream than the reducer's parameters
        for stream in self._streams:
            torch.accelerator.current_stream(stream.device).wait_stream(stream)
        with torch.no_grad():
            views = self._views(number, self._buffer(number))
            for parameter, view in zip(self.parameters[number], views, strict=True):
                if parameter.grad is not None and self.factor == 1.0:
                    view.copy_(parameter.grad)
                elif parameter.grad is not None:
                    torch.mul(parameter.grad, self.factor, out=view)

    def complete(self, failed: bool, skips: tuple[bool, bool], marks: Sequence[int]) -> None:
        """Start the remaining buckets, and report to the other replicas; called when all gradients are complete.

        Args:
            failed: the step failed here: send zeros, which are ignored.
            skips: whether it failed because the pipeline has parameters without a reducer, and whether this wrapper has
                them.

        Raises:
            RuntimeError: if a hook has raised before, so that this replica has left out a collective.
        """
        self.unwatch()
        if len(self._used) > len(self._futures):
            raise RuntimeError("the communication hook has raised, so the other buckets are not reduced")
        early, self._failed = len(self._futures), failed
        while not self.in_turn and len(self._futures) < len(self.buckets):
            self._start(failed=failed)
        again = [int(number < early and self._changed(number)) for number in range(len(self.buckets))]
        used = [int(p.grad is not None and not failed) for parameters in self.parameters for p in parameters]
        status = [int(failed), *map(int, skips), *marks, *again, *used]
        self.status = torch.tensor(status, dtype=torch.int64, device=self._buffer(0).device)
        self._reported = None if self._has_hook else self._report()  # a hook may still raise: see `end_hooks`

    def _report(self) -> Any:
        return dist.all_reduce(self.status, group=self.wrapper.process_group, async_op=True).get_future()

    def end_hooks(self, wait: Callable[[Any], Any]) -> None:
        """Wait for the averages of a user's hook, if there is one, and report an error of it to the other replicas.

        Only the report shows whether a replica is lost, or whether the hook raised for another reason.
        """
        if self._reported is not None:
            return
        for number in range(len(self.buckets)):
            if number == len(self._futures):
                self._start(failed=self._failed)
            try:
                wait(self._futures[number])
            except FailureError:
                raise
            except Exception as error:  # raised by `Replicated.finish`
                # without its frames, of which this one holds it
                self.error, self.status[0] = error.with_traceback(None), 1
        self._reported = self._report()

    def unwatch(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._streams.clear()

    def _changed(self, number: int) -> bool:
        """Whether a gradient has changed since it was copied into the bucket."""
        pairs = zip(self._grads(number), self._used[number], strict=True)
        return any(grad is not before or version != old for (grad, version), (before, old) in pairs)

    def _grads(self, number: int) -> list[tuple[torch.Tensor | None, int]]:
        """The gradients of a bucket's parameters, and their versions."""
        return [(p.grad, 0 if p.grad is None else version_of(p.grad)) for p in self.parameters[number]]

    def finish(self, wait: Callable[[Any], Any]) -> None:
        """Read the reports, and copy the averages into ``.grad``.

        Args:
            wait: returns a future's value.
        """
        wait(self._reported)
        self.num_failed, self.num_skipping, self.num_missing, *rest = self.status.tolist()
        self.marks, flags = rest[:3], rest[3:]
        again, used = flags[: len(self.buckets)], flags[len(self.buckets) :]
        self.again = any(again)
        averages: list[torch.Tensor] = []
        for number, repeat in enumerate(again if self.error is None else ()):
            averages += self._average(number, wait, repeat=bool(repeat) and not self.num_failed)
        parameters = [parameter for each in self.parameters for parameter in each]
        with torch.no_grad():
            for parameter, average, count in zip(parameters, averages, used, strict=self.error is None):
                if count and not self.num_failed:
                    parameter.grad = zero_grad_of(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad.copy_(average)

    def _average(self, number: int, wait: Callable[[Any], Any], *, repeat: bool) -> list[torch.Tensor]:
        result = wait(self._futures[number])
        if repeat:
            self._buffer(number).zero_()
            self._fill(number)
            result = wait(self._run(self.buckets[number]))
        return self._views(number, result[0] if isinstance(result, list | tuple) else result)


class Reduced:
    """The parameters of one wrapper."""

    def __init__(self, wrapper: DistributedDataParallel, stage: int) -> None:
        self.wrapper: Any = wrapper
        self.stage = stage
        self._note()

    def _note(self) -> None:
        self._places = {
            id(p): (module, name)
            for module in self.wrapper.module.modules()
            for name, p in parameters_of(module).items()
        }
        # the reducer's own: others may have been frozen since the wrapper was created
        buckets = torch_private.buckets_of(self.wrapper)
        self._parameters = [parameter for bucket in buckets for parameter in bucket.parameters()]
        self._note_buffers()

    def _note_buffers(self) -> None:
        ignored = self.wrapper.parameters_to_ignore
        self._buffers = [buffer for name, buffer in self.wrapper.module.named_buffers() if name not in ignored]

    def broadcast_buffers(self, wait: Callable[[Any], Any], *, as_known: bool) -> None:
        """Broadcast the first replica's buffers, as bytes: backends do not support every dtype.

        Args:
            wait: returns a future's value.
            as_known: those of the last broadcast; else the current ones.
        """
        if not as_known:
            self._note_buffers()
        if not self._buffers:
            return
        parts = [bytes_of(buffer, buffer.device) for buffer in self._buffers]
        block, group = torch.cat(parts), self.wrapper.process_group
        wait(dist.broadcast(block, group=group, group_src=0, async_op=True).get_future())
        if group.rank():
            for buffer, part in zip(self._buffers, torch.split(block, list(map(len, parts))), strict=True):
                # cloned to be aligned; through .data, as a forward before the step may have saved the buffer
                buffer.data.copy_(part.clone().view(buffer.dtype).view(buffer.shape))

    def in_place(self, parameter: nn.Parameter) -> nn.Parameter:
        """The parameter that is now in its place: for a tied weight, an alias during a step."""
        module, name = self._places[id(parameter)]
        found = parameters_of(module).get(name)
        # a parametrization removes a parameter and holds others
        return parameter if found is None else found

    def unreduced(self) -> list[str]:
        """Names of trainable parameters that the reducer does not cover. Checked in every step.

        Raises:
            ValueError: if the wrapper cannot cover them.
        """
        reduced = {id(self.in_place(parameter)) for parameter in self._parameters}
        found = [
            parameter
            for module in walked(self.wrapper.module)
            for parameter in parameters_of(module).values()
            if parameter is not None and parameter.requires_grad and id(parameter) not in reduced
        ]
        if not found:
            return []
        ids = set(map(id, found))
        ignored = self.wrapper.parameters_to_ignore
        names = [name for name, p in self.wrapper.module.named_parameters() if id(p) in ids and name not in ignored]
        if names and torch_private.has_comm_hook(self.wrapper):
            raise ValueError(
                f"data_parallel: stage {self.stage} has trainable parameters that it did not have before, "
                f"{listed(names)}, and its DistributedDataParallel has a communication hook, which may depend on the "
                "old buckets; build a new Pipeline"
            )
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in found):
            raise ValueError(
                f"data_parallel: of the parameters that stage {self.stage} did not have before, {listed(names)}, some "
                "have no shape yet; run a forward of the new layer first"
            )
        return names

    def reduce_new(self) -> None:
        """Broadcast the first replica's values, and reduce all trainable parameters; called on all replicas.

        Raises:
            ValueError: if the replicas train different parameters, or have gradients of different values.
        """
        self._compare()
        self._broadcast()
        torch_private.renew_reducer(self.wrapper)
        self._note()

    def _compare(self) -> None:
        trained = [(name, p) for name, p in self.wrapper.module.named_parameters() if p.requires_grad]
        text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in trained)
        if not same_text(text, [self.wrapper.process_group], self.wrapper.device):
            raise ValueError(
                f"data_parallel: the replicas of stage {self.stage} do not have the same new parameters, "
                f"here {listed(self.unreduced())}; unfreeze, replace or append the same layers in all replicas"
            )

    def _broadcast(self) -> None:
        """Broadcast the first replica's values; refuse gradients from `no_sync` if values differed between replicas."""
        unreduced = set(self.unreduced())
        added = [p for name, p in self.wrapper.module.named_parameters() if name in unreduced and p.grad is not None]
        before = [parameter.detach().clone() for parameter in added]
        torch_private.sync_module(self.wrapper)
        same = all(torch.equal(old, new) for old, new in zip(before, added, strict=True))
        others = torch.tensor(int(not same), dtype=torch.int32, device=self.wrapper.device)
        dist.all_reduce(others, group=self.wrapper.process_group)
        if int(others):
            raise ValueError(
                f"data_parallel: steps in no_sync have trained parameters of stage {self.stage} that are new, "
                f"{listed(sorted(unreduced))}, and had other values in other replicas; they have the first replica's "
                "now: set all gradients to None and repeat these steps, or let the first step after a change reduce"
            )


class Replicated(DataParallel):
    """Every replica has the whole stage."""

    wrapped: Sequence[DistributedDataParallel]
    whole_gradients = True

    def __init__(self, wrappers: Sequence[DistributedDataParallel], stage: int) -> None:
        self.wrapped = wrappers
        self.stage = stage
        self.device: torch.device = wrappers[0].device
        self.groups = list(dict.fromkeys(wrapper.process_group for wrapper in wrappers))
        self.num_replicas = max(group.size() for group in self.groups)
        self.description = f"in DistributedDataParallel over {self.num_replicas} replicas"
        self._set: list[dict[str, bool]] = []
        self._took_part = False
        self._early: Average | None = None
        self._running: list[Average] = []
        self._skips = False
        self._missing: dict[DistributedDataParallel, int] = {}
        for wrapper in wrappers:
            _check_options(wrapper, stage)
        self._reduced = {wrapper: Reduced(wrapper, stage) for wrapper in wrappers}
        self._starts_early = self._may_start_early()

    def _may_start_early(self) -> bool:
        modules = (module for wrapper in self.wrapped for module in wrapper.module.modules())
        return len(self.wrapped) == 1 and not any(isinstance(module, nn.SyncBatchNorm) for module in modules)

    def prepare(self) -> None:
        """Refuse a communication hook whose gradients and buckets would differ in dtype, and contexts in which replicas
        that have no batch expect the collectives of the wrapper's own forward and backward."""
        for wrapper in self.wrapped:
            has_hook, parameters = torch_private.has_comm_hook(wrapper), wrapper.module.parameters()
            refused = {
                "was given to Join, where replicas without a batch do not take part in a pipeline's averages; wrap the "
                "stage again, and call step equally often in all replicas (with a loss multiplied by 0 where the data "
                "has ended)": torch_private.is_joined(wrapper),
                "has a communication hook for buffers, which a pipeline does not run; leave it out, and the first "
                "replica's buffers are broadcast before each step": torch_private.has_buffer_hook(wrapper),
                "has a communication hook, whose buckets are of the parameters' dtype; leave out the hook, or "
                "grad_dtype": has_hook and any(map(has_grad_dtype, parameters)),
            }
            for reason, is_found in refused.items():
                if is_found:
                    raise ValueError(f"data_parallel: the DistributedDataParallel of stage {self.stage} {reason}")

    def unreduced(self) -> list[str]:
        """By wrapper, in the order of a new DistributedDataParallel."""
        # no_sync() of the user is respected
        reducing = [wrapper for wrapper in self.wrapped if wrapper.require_backward_grad_sync]
        found = [(wrapper, self._reduced[wrapper].unreduced()) for wrapper in reducing]
        for wrapper in (wrapper for wrapper, names in found if names):
            _check_options(wrapper, self.stage)
        return [name for _, names in found for name in names]

    def skip_step(self) -> None:
        """Report at REDUCE_GRAD."""
        self._skips = True

    def reduce_new(self) -> bool:
        """Rebuild the reducers that do not cover all parameters."""
        missing, self._missing = self._missing, {}
        for wrapper, count in missing.items():
            if 0 < count < self.num_replicas:
                raise ValueError(
                    f"data_parallel: {count} of {self.num_replicas} replicas of stage {self.stage} have trainable "
                    "parameters that were not trainable when it was wrapped, here "
                    f"{listed(self._reduced[wrapper].unreduced())}; unfreeze, replace or append "
                    "the same layers in all replicas"
                )
        found = [wrapper for wrapper, count in missing.items() if count]
        for wrapper in found:
            self._reduced[wrapper].reduce_new()
        self._starts_early = self._may_start_early() if found else self._starts_early
        return bool(found)

    def begin(self, reduces: bool, num_microbatches: int, timeout: float) -> None:
        """Disable the wrapper's hooks."""
        super().begin(reduces, num_microbatches, timeout)
        self._took_part = self._skips = False
        self._set = [
            {name: vars(w)[name] for name in torch_private.NOT_REDUCING if name in vars(w)} for w in self.wrapped
        ]
        for wrapper, flags in zip(self.wrapped, self._set, strict=True):
            vars(wrapper).update({name: torch_private.NOT_REDUCING[name] for name in flags})

    def unshard(self) -> None:
        """Broadcast the first replica's buffers, as the wrapper's forward does."""
        wrapper: Any
        for wrapper in filter(torch_private.sends_buffers, self.wrapped):
            wrapper.require_forward_param_sync = False
            group = wrapper.process_group
            if group in self.broken:
                raise RuntimeError(self.broken[group])
            # a replica that skips the step may have more buffers than one that runs the step
            wait = partial(self.wait, deadline=time.monotonic() + self.timeout, group=group)
            self._reduced[wrapper].broadcast_buffers(wait, as_known=self._skips)

    def reshard(self) -> None:
        """Nothing is sharded."""

    def last_backward(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """Start the average of each bucket once its gradients are complete."""
        # All replicas need the same order of collectives, whatever their gradients. Of two wrappers either may be
        # first; a SyncBatchNorm has collectives of its own in the backward.
        is_early = self._starts_early and not self._begun and not self.lost()
        if self._reduces and is_early and self._set[0]["require_backward_grad_sync"]:
            self._early = Average(self.wrapped[0], self._reduced[self.wrapped[0]].in_place)
            if not self._early.in_turn:
                self._early.watch(comes)

    def reduce_grad(self, failed: bool) -> None:
        """Start the remaining averages."""
        if not self._reduces or self._begun:
            return
        self._begun = True
        if self.lost():  # `finish` reports that this replica took no part
            return
        for wrapper, flags in zip(self.wrapped, self._set, strict=True):
            # no_sync() of the user is respected
            if flags["require_backward_grad_sync"]:
                average = self._early or Average(wrapper, self._reduced[wrapper].in_place)
                self._early = None
                skips = self._skips, self._skips and bool(self._reduced[wrapper].unreduced())
                try:
                    average.complete(failed, skips, self.marks())
                except Exception as error:  # of a hook, before its collective
                    self.broken[wrapper.process_group] = cause_text(error)
                    raise
                self._running.append(average)
        self._took_part = True

    def finish(self, failure: str | None, deadline: float) -> None:
        """Wait for the averages, and copy them into ``.grad``."""
        running, self._running = self._running, []
        try:
            failure = self._end_hooks(running, failure, deadline)
            for average in running:
                average.finish(partial(self.wait, deadline=deadline, group=average.wrapper.process_group))
            num_failed = max((average.num_failed for average in running), default=0)
            num_skipping = max((average.num_skipping for average in running), default=0)
            cause = f"the step failed in {num_failed} of {self.num_replicas} replicas of this stage"
            if num_failed and not num_skipping:
                cause = self.explained(cause, failure, deadline)
        except FailureError as error:
            if error.failure.is_fatal:  # replicas wait in the groups of the other wrappers, too
                self.broken.update(dict.fromkeys(self.groups, error.failure.cause))
            raise
        except Exception as error:  # replicas may wait in a collective that has not begun here
            self.broken.update(dict.fromkeys(self.groups, cause_text(error)))
            raise FailureError(Failure(None, cause_text(error), is_fatal=True)) from error
        finally:
            self._restore([average.wrapper for average in running])
        # equal on every replica
        self._starts_early &= not any(average.again for average in running)
        self._missing = {average.wrapper: average.num_missing for average in running}
        self._raise_own(running)
        if failure is not None:
            return
        if num_skipping:
            cause = (
                f"data_parallel: {num_skipping} of {self.num_replicas} replicas have new trainable parameters since "
                "the last step, and this one has none; unfreeze, replace or append the same layers in all replicas"
            )
            raise FailureError(Failure(None, cause))
        if not num_failed:
            cause = next(filter(None, (self.why_not_same(*average.marks) for average in running)), "")
        if cause:
            raise FailureError(Failure(None, cause))

    def _end_hooks(self, running: Sequence[Average], failure: str | None, deadline: float) -> str | None:
        """Wait for users' communication hooks; returns where and why the step has failed here by now, if it has."""
        is_broken = bool(self.lost()) and any(average.in_turn for average in running)  # these hooks would begin now
        if self._begun and (is_broken or not self._took_part):
            why = failure or next(map(self.broken.get, self.lost()), "it failed")
            cause = f"this replica of stage {self.stage} could not reduce its gradients: {why}"
            raise FailureError(Failure(None, cause, is_fatal=True))
        for average in running:
            average.end_hooks(lambda future: wait_for(future, deadline, self.why_late))
        own = next((cause_text(average.error) for average in running if average.error is not None), None)
        return own if failure is None else failure

    def _raise_own(self, running: Sequence[Average]) -> None:
        for average in running:
            error, average.error = average.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # breaks the cycle of exception and frame

    def _restore(self, reduced: Sequence[DistributedDataParallel]) -> None:
        if self._early is not None:
            self._early.unwatch()
            self._early = None
        for wrapper, flags in zip(self.wrapped, self._set, strict=True):
            vars(wrapper).update(flags)
        for wrapper in reduced:
            # as after a normal backward: the next forward broadcasts the buffers
            wrapper.require_forward_param_sync = True


def _check_options(wrapper: DistributedDataParallel, stage: int) -> None:
    """Refuse options that depend on hooks in the backward."""
    sparse = [m for m in wrapper.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    refused = {
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": torch_private.has_delayed_all_reduce(wrapper),
        "a sparse embedding": bool(sparse),
        "torch._dynamo.config.optimize_ddp = 'python_reducer'": torch_private.has_python_reducer(wrapper),
    }
    for option, found in refused.items():
        if found:
            raise ValueError(
                f"stages: the DistributedDataParallel of stage {stage} has {option}, which a pipeline cannot keep, as "
                "gradients are reduced once per step; leave it out"
            )
