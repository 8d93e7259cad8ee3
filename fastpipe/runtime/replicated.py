"""Stages in DistributedDataParallel: its buckets are averaged once a step, by its own communication hook.

Its reducer counts on one hook a parameter in the backward that it was armed for. In a pipeline there is no such
backward: the last I and the last W of a stage may have others between them. So it is never armed. When the gradients
of a step are complete they are put into buckets made as the reducer's own, which are reduced in the background.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.data_parallel import DataParallel, ReplicaError, SilentReplicaError

_HELD_BACK = {"require_backward_grad_sync": False, "_static_graph_delay_allreduce_enqueued": True}
"""Flags of a wrapper while a step runs: no hook reduces, not even at the end of a static graph's first backward."""


class Replicated(DataParallel):
    """Every replica has the whole stage.

    Args:
        wrappers: the DistributedDataParallel of the stage, most often one.
        stage: the stage's index, for messages.
    """

    def __init__(self, wrappers: Sequence[DistributedDataParallel], stage: int) -> None:
        self.wrappers = wrappers
        self.stage = stage
        self._set: list[dict[str, bool]] = []
        self._reduces = False
        self._begun = False
        self._under_way: list[_Average] = []
        for wrapper in wrappers:
            _check_options(wrapper, stage)

    def begin(self, reduces: bool) -> None:
        """No hook reduces from now on."""
        self._reduces = reduces
        self._begun = False
        self._set = [{name: vars(w)[name] for name in _HELD_BACK if name in vars(w)} for w in self.wrappers]
        for wrapper, flags in zip(self.wrappers, self._set, strict=True):
            vars(wrapper).update({name: _HELD_BACK[name] for name in flags})

    def unshard(self, failed: bool) -> None:
        """Send the first replica's buffers to the others, which the forward would do."""
        wrapper: Any
        for wrapper in self.wrappers:
            if wrapper._check_sync_bufs_pre_fwd():
                wrapper.require_forward_param_sync = False
                wrapper._sync_buffers()

    def reshard(self) -> None:
        """Nothing is sharded."""

    def reduce_grad(self, failed: bool) -> None:
        """Start the averages."""
        if not self._reduces or self._begun:
            return
        self._begun = True
        for wrapper, flags in zip(self.wrappers, self._set, strict=True):
            # the user's own no_sync() is kept, too
            if flags["require_backward_grad_sync"]:
                self._under_way.append(_Average(wrapper, failed))

    def finish(self, failed: bool, deadline: float) -> None:
        """Await the averages, and put them into ``.grad``."""
        under_way, self._under_way = self._under_way, []
        try:
            num_failed = [average.finish(deadline) for average in under_way]
        except TimeoutError as error:
            raise SilentReplicaError(
                f"the gradients of stage {self.stage} were not reduced within the Pipeline's timeout: another of its "
                f"{self.num_replicas} replicas did not come"
            ) from error
        finally:
            self._restore([average.wrapper for average in under_way])
        if any(num_failed) and not failed:
            raise ReplicaError(f"the step failed in {max(num_failed)} of {self.num_replicas} replicas of this stage")

    def _restore(self, reduced: Sequence[DistributedDataParallel]) -> None:
        for wrapper, flags in zip(self.wrappers, self._set, strict=True):
            vars(wrapper).update(flags)
        for wrapper in reduced:
            # as after a backward of its own: the next forward brings the buffers together
            wrapper.require_forward_param_sync = True

    @property
    def num_replicas(self) -> int:
        """The size of the wrappers' group."""
        return max(wrapper.process_group.size() for wrapper in self.wrappers)

    @property
    def whole_gradients(self) -> bool:
        """It is."""
        return True

    @property
    def description(self) -> str:
        """In one line."""
        return f"in DistributedDataParallel over {self.num_replicas} replicas"


def _check_options(wrapper: DistributedDataParallel, stage: int) -> None:
    """Refuse what depends on hooks in the backward.

    Raises:
        ValueError: naming the option.
    """
    sparse = [m for m in wrapper.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag) and m.sparse]
    refused = {
        "mixed_precision": wrapper.mixed_precision is not None,
        "delay_all_reduce_named_params": bool(wrapper._delay_all_reduce_params),
        "a sparse embedding": bool(sparse),
        "torch._dynamo.config.optimize_ddp = 'python_reducer'": wrapper._use_python_reducer,
    }
    for option, found in refused.items():
        if found:
            raise ValueError(
                f"stages: the DistributedDataParallel of stage {stage} has {option}, which a pipeline cannot keep, as "
                "gradients are reduced once a step; leave it out"
            )


class _Average:
    """The gradients of one wrapper, on their way to their average over the replicas.

    Args:
        wrapper: whose parameters, group and communication hook.
        failed: send zeros instead, and that they mean nothing.
    """

    def __init__(self, wrapper: Any, failed: bool) -> None:
        self.wrapper = wrapper
        self.buckets = wrapper.reducer._get_zeros_like_grad_buckets()
        self.parameters: list[nn.Parameter] = [p for bucket in self.buckets for p in bucket.parameters()]
        # as the reducer does it: a hook gets gradients as they are, without one they are divided before they are summed
        hooked = bool(wrapper._get_ddp_logging_data().get("comm_hook"))
        factor = 1.0 if hooked else 1.0 / wrapper.process_group.size()
        if not failed:
            _fill(self.parameters, [view for bucket in self.buckets for view in bucket.gradients()], factor)
        used = [int(p.grad is not None and not failed) for p in self.parameters]
        self.status = torch.tensor([int(failed), *used], dtype=torch.int32, device=self.buckets[0].buffer().device)
        work = dist.all_reduce(self.status, group=wrapper.process_group, async_op=True)
        self.futures = [work.get_future(), *map(wrapper.reducer._run_comm_hook, self.buckets)]

    def finish(self, deadline: float) -> int:
        """Put the averages into ``.grad``; in how many replicas the step failed.

        Raises:
            TimeoutError: when they are not there by the deadline.
        """
        _, *results = [_awaited(future, deadline) for future in self.futures]
        num_failed, *used = self.status.tolist()
        averages = []
        for bucket, result in zip(self.buckets, results, strict=True):
            bucket.set_buffer(result[0] if isinstance(result, list | tuple) else result)
            averages += bucket.gradients()
        with torch.no_grad():
            for parameter, average, count in zip(self.parameters, averages, used, strict=True):
                if count:
                    parameter.grad = torch.empty_like(parameter) if parameter.grad is None else parameter.grad
                    parameter.grad.copy_(average)
        return int(num_failed)


def _fill(parameters: Sequence[nn.Parameter], views: Sequence[torch.Tensor], factor: float) -> None:
    with torch.no_grad():
        for parameter, view in zip(parameters, views, strict=True):
            if parameter.grad is not None and factor == 1.0:
                view.copy_(parameter.grad)
            elif parameter.grad is not None:
                torch.mul(parameter.grad, factor, out=view)


def _awaited(future: Any, deadline: float) -> Any:
    """A future's value; `Future.wait` knows no limit of time."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    if not done.wait(max(0.0, deadline - time.monotonic())):
        raise TimeoutError
    return future.wait()
