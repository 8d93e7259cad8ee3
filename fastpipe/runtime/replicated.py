"""Stages in DistributedDataParallel: its buckets are averaged once a step, by its own communication hook.

Its reducer counts on one hook a parameter in the backward that it was armed for. In a pipeline there is no such
backward: the last I and the last W of a stage may have others between them. And the end of that backward would wait for
the averages, with gradients for other ranks still to be sent. So it is never armed. Buckets made as the reducer's own
are reduced in the background, each as soon as the stage's last B or W has completed it, the rest at REDUCE_GRAD.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.averages import Average, has_comm_hook
from fastpipe.runtime.data_parallel import DataParallel, ReplicaError, SilentReplicaError, listed
from fastpipe.runtime.grad_dtype import has_grad_dtype
from fastpipe.runtime.reduced import Reduced

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
        self._early: Average | None = None
        self._under_way: list[Average] = []
        self._asks = False
        self._missing: dict[DistributedDataParallel, int] = {}
        for wrapper in wrappers:
            _check_options(wrapper, stage)
        self._reduced = {wrapper: Reduced(wrapper, stage) for wrapper in wrappers}
        self._starts_early = self._may_start_early()

    @property
    def wrapped(self) -> Sequence[nn.Module]:
        """The DistributedDataParallel."""
        return self.wrappers

    def _may_start_early(self) -> bool:
        modules = (module for wrapper in self.wrappers for module in wrapper.module.modules())
        return len(self.wrappers) == 1 and not any(isinstance(module, nn.SyncBatchNorm) for module in modules)

    def prepare(self) -> None:
        """Refuse a communication hook that would get gradients of another dtype than its buckets'."""
        for wrapper in self.wrappers:
            if has_comm_hook(wrapper) and any(map(has_grad_dtype, wrapper.module.parameters())):
                raise ValueError(
                    f"grad_dtype: the DistributedDataParallel of stage {self.stage} has a communication hook, whose "
                    "buckets are of the parameters' dtype; leave out one of the two"
                )

    def missed(self) -> list[str]:
        """By wrapper, as torch would begin with them if the stage were wrapped now."""
        # the user's own no_sync() is kept, too
        reducing = [wrapper for wrapper in self.wrappers if wrapper.require_backward_grad_sync]
        found = [(wrapper, self._reduced[wrapper].missed()) for wrapper in reducing]
        for wrapper in (wrapper for wrapper, names in found if names):
            _check_options(wrapper, self.stage)
        return [name for _, names in found for name in names]

    def ask(self) -> None:
        """What is to be said is said at REDUCE_GRAD."""
        self._asks = True

    def adopt(self) -> bool:
        """Make the reducers anew that miss parameters."""
        missing, self._missing = self._missing, {}
        for wrapper, count in missing.items():
            if 0 < count < self.num_replicas:
                raise ValueError(
                    f"data_parallel: {count} of {self.num_replicas} replicas of stage {self.stage} have parameters to "
                    f"train that were not when it was wrapped, here {listed(self._reduced[wrapper].missed())}; "
                    "unfreeze, exchange or append layers in all replicas alike"
                )
        found = [wrapper for wrapper, count in missing.items() if count]
        for wrapper in found:
            self._reduced[wrapper].adopt()
        self._starts_early = self._may_start_early() if found else self._starts_early
        return bool(found)

    def begin(self, reduces: bool) -> None:
        """No hook reduces from now on."""
        self._reduces = reduces
        self._begun = self._asks = False
        self._set = [{name: vars(w)[name] for name in _HELD_BACK if name in vars(w)} for w in self.wrappers]
        for wrapper, flags in zip(self.wrappers, self._set, strict=True):
            vars(wrapper).update({name: _HELD_BACK[name] for name in flags})

    def unshard(self, failed: bool) -> None:
        """Send the first replica's buffers to the others, which the forward would do."""
        wrapper: Any
        for wrapper in self.wrappers:
            if wrapper._check_sync_bufs_pre_fwd():
                wrapper.require_forward_param_sync = False
                if self._asks:
                    # who asks may have more of them than another who makes the step
                    wrapper._sync_module_buffers(0)
                else:
                    wrapper._sync_buffers()

    def reshard(self) -> None:
        """Nothing is sharded."""

    def last_backward(self, comes: Callable[[nn.Parameter], bool]) -> None:
        """Start the average of each bucket as the gradients come."""
        # The order of collectives must be that of the other replicas, whatever their gradients are. Of two wrappers
        # either may be first; a SyncBatchNorm has collectives of its own in the backward.
        if self._reduces and not self._begun and self._starts_early and self._set[0]["require_backward_grad_sync"]:
            self._early = self._average(self.wrappers[0])
            self._early.watch(comes)

    def reduce_grad(self, failed: bool) -> None:
        """Start the averages that have not been started."""
        if not self._reduces or self._begun:
            return
        self._begun = True
        for wrapper, flags in zip(self.wrappers, self._set, strict=True):
            # the user's own no_sync() is kept, too
            if flags["require_backward_grad_sync"]:
                average = self._early or self._average(wrapper)
                self._early = None
                average.complete(failed, (self._asks, self._asks and bool(self._reduced[wrapper].missed())))
                self._under_way.append(average)

    def _average(self, wrapper: DistributedDataParallel) -> Average:
        return Average(wrapper, self._reduced[wrapper].in_place)

    def finish(self, failed: bool, deadline: float) -> None:
        """Await the averages, and put them into ``.grad``."""
        under_way, self._under_way = self._under_way, []
        try:
            ends = [average.finish(deadline) for average in under_way]
        except TimeoutError as error:
            raise SilentReplicaError(
                f"the gradients of stage {self.stage} were not reduced within the Pipeline's timeout: another of its "
                f"{self.num_replicas} replicas did not come"
            ) from error
        finally:
            self._restore([average.wrapper for average in under_way])
        # every replica sees the same
        self._starts_early &= not any(end.again for end in ends)
        self._missing = {average.wrapper: end.num_missing for average, end in zip(under_way, ends, strict=True)}
        if ends and not failed:
            self._check(max(end.num_failed for end in ends), max(end.num_asking for end in ends))

    def _check(self, num_failed: int, num_asking: int) -> None:
        """Whether all replicas made the step."""
        if num_asking:
            raise ReplicaError(
                f"data_parallel: {num_asking} of {self.num_replicas} replicas have parameters to train since the last "
                "step that were not when the stages were wrapped, and this one has none; unfreeze, exchange or append "
                "layers in all replicas alike"
            )
        if num_failed:
            raise ReplicaError(f"the step failed in {num_failed} of {self.num_replicas} replicas of this stage")

    def _restore(self, reduced: Sequence[DistributedDataParallel]) -> None:
        if self._early is not None:
            self._early.unwatch()
            self._early = None
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
