"""What a DistributedDataParallel reduces, while layers are unfrozen, exchanged or appended in it.

Its reducer knows the parameters that were to be trained when it was made. A step looks whether there are others now;
then, and when all replicas have the same ones, the reducer is made anew, as the wrapper itself does when it is
unpickled: so it stays the same object, with its settings.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.utils import _sync_module_states
from torch.nn.parallel import DistributedDataParallel

from fastpipe.runtime.averages import has_comm_hook
from fastpipe.runtime.data_parallel import listed
from fastpipe.runtime.walked import walked


class Reduced:
    """The parameters of one wrapper.

    Args:
        wrapper: which.
        stage: the stage's index, for messages.
    """

    def __init__(self, wrapper: DistributedDataParallel, stage: int) -> None:
        self.wrapper: Any = wrapper
        self.stage = stage
        self._note()

    def _note(self) -> None:
        self._places = {
            id(p): (module, name) for module in self.wrapper.module.modules() for name, p in module._parameters.items()
        }
        # the reducer's own, since who wrapped it may have frozen others since then
        buckets = self.wrapper.reducer._get_zeros_like_grad_buckets()
        self._parameters = [parameter for bucket in buckets for parameter in bucket.parameters()]

    def in_place(self, parameter: nn.Parameter) -> nn.Parameter:
        """What stands where the parameter stood when it was wrapped: of a tied weight, an alias while a step runs."""
        module, name = self._places[id(parameter)]
        found = module._parameters.get(name)
        # a parametrization takes a parameter away and holds others instead
        return parameter if found is None else found

    def missed(self) -> list[str]:
        """The parameters that are to be trained and not reduced, by name. Looked for in every step.

        Raises:
            ValueError: where the wrapper cannot be told of them.
        """
        reduced = {id(self.in_place(parameter)) for parameter in self._parameters}
        found = [
            parameter
            for module in walked(self.wrapper.module)
            for parameter in module._parameters.values()
            if parameter is not None and parameter.requires_grad and id(parameter) not in reduced
        ]
        return self._named(found) if found else []

    def _named(self, found: list[nn.Parameter]) -> list[str]:
        ids = set(map(id, found))
        ignored = self.wrapper.parameters_to_ignore
        names = [name for name, p in self.wrapper.module.named_parameters() if id(p) in ids and name not in ignored]
        if names and has_comm_hook(self.wrapper):
            raise ValueError(
                f"data_parallel: stage {self.stage} has parameters to train that it did not have before, "
                f"{listed(names)}, and its DistributedDataParallel a communication hook, which may go by the buckets "
                "that there were; build the Pipeline anew"
            )
        if any(isinstance(parameter, nn.UninitializedParameter) for parameter in found):
            raise ValueError(
                f"data_parallel: of the parameters that stage {self.stage} did not have before, {listed(names)}, some "
                "have no shape yet; run a forward of the new layer before"
            )
        return names

    def adopt(self) -> None:
        """Begin with the first replica's values, and reduce all that is to be trained; all replicas come here.

        Raises:
            ValueError: when they do not train the same, or gradients are those of other values.
        """
        self._compare()
        self._bring_together()
        self._renew()
        self._note()

    def _compare(self) -> None:
        trained = [(name, p) for name, p in self.wrapper.module.named_parameters() if p.requires_grad]
        text = "\n".join(f"{name} {tuple(p.shape)} {p.dtype}" for name, p in trained)
        own = torch.tensor(list(hashlib.sha256(text.encode()).digest()), dtype=torch.int32, device=self.wrapper.device)
        group = self.wrapper.process_group
        everywhere = [torch.empty_like(own) for _ in range(group.size())]
        dist.all_gather(everywhere, own, group=group)
        if not all(torch.equal(other, own) for other in everywhere):
            raise ValueError(
                f"data_parallel: the replicas of stage {self.stage} do not have the same new parameters to train, "
                f"here {listed(self.missed())}; unfreeze, exchange or append layers in all replicas alike"
            )

    def _bring_together(self) -> None:
        """What was added in `no_sync` counts if it was added alike: a layer that was made here may be another there."""
        missed = set(self.missed())
        added = [p for name, p in self.wrapper.module.named_parameters() if name in missed and p.grad is not None]
        before = [parameter.detach().clone() for parameter in added]
        group, ignored = self.wrapper.process_group, self.wrapper.parameters_to_ignore
        size = self.wrapper.broadcast_bucket_size
        _sync_module_states(self.wrapper.module, group, size, 0, ignored, self.wrapper.broadcast_buffers)
        same = all(torch.equal(old, new) for old, new in zip(before, added, strict=True))
        others = torch.tensor(int(not same), dtype=torch.int32, device=self.wrapper.device)
        dist.all_reduce(others, group=group)
        if int(others):
            raise ValueError(
                f"data_parallel: steps in no_sync have trained parameters of stage {self.stage} that are new, "
                f"{listed(sorted(missed))}, and had other values in other replicas; they have the first replica's "
                "now: set all gradients to None and repeat these steps, or let the first step after a change reduce"
            )

    def _renew(self) -> None:
        wrapper = self.wrapper
        ignored = wrapper.parameters_to_ignore
        wrapper._module_parameters = [p for name, p in wrapper.module.named_parameters() if name not in ignored]
        parameters, sparse = wrapper._build_params_for_reducer()
        names = wrapper._build_debug_param_to_name_mapping(parameters)
        wrapper._ddp_init_helper(parameters, sparse, names, wrapper.static_graph)
        if wrapper.static_graph:
            wrapper.reducer._set_static_graph()
            wrapper.logger._set_static_graph()
        wrapper._has_rebuilt_buckets = False
