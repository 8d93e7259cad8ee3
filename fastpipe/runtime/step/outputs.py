"""Losses, metrics and added losses of a step, gathered over the ranks.

On a device they complete after the host ends the step; `fastpipe.runtime.executor.events` says whether they are valid.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fastpipe.runtime.coordination import Alone, Control, DeferredResults, Reply
from fastpipe.runtime.executor import DeviceEvent, DeviceEvents
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.step.result import Values, packing, packing_tensors

Part = Callable[[], Mapping[str, Any]]
"""Returns the outputs of one process, in the form of `StepOutputs.packed`."""


@dataclass(frozen=True)
class StepOutputs:
    """Losses, metrics and added losses on the process that computed them.

    Attributes:
        losses: by microbatch, as the loss function returned them.
        scaled: by microbatch, as shares in the loss of the batch.
        metrics: by stage and microbatch.
        added: losses that stages added, by stage and microbatch.
    """

    losses: dict[int, torch.Tensor]
    scaled: dict[int, torch.Tensor]
    metrics: Values
    added: Values

    @classmethod
    def on(cls, stages: Sequence[Stage]) -> StepOutputs:
        """The outputs of the step that has just run on these stages; stages with two local holders are merged."""
        losses, scaled = (
            {i: loss for stage in stages for i, loss in getattr(stage.work, name).items()}
            for name in ("losses", "scaled")
        )
        return cls(losses, scaled, _by_stage(stages, "metrics"), _by_stage(stages, "added"))

    def __bool__(self) -> bool:
        return bool(self.losses or any(self.metrics.values()) or any(self.added.values()))

    def packed(self) -> Reply:
        """As JSON, exact to the last bit. Waits for the device."""
        return {name: pack() for name, pack in self._packing(wait=True).items()}

    def packed_later(self, device: torch.device, events: DeviceEvents) -> tuple[DeviceEvent, Callable[[], Reply]]:
        """An event for the outputs, and a function that packs them; a helper thread calls it, as it waits."""
        packing = self._packing(wait=False)
        copied = events.make(device)

        def ready() -> Reply:
            # otherwise the wait would create a CUDA context on the thread's default device
            torch.accelerator.set_device_index(device.index or 0)
            copied.wait()
            return {name: pack() for name, pack in packing.items()}

        return copied, ready

    def _packing(self, *, wait: bool) -> dict[str, Callable[[], Any]]:
        return {
            "losses": packing_tensors(self.losses, wait=wait),
            "scaled": packing_tensors(self.scaled, wait=wait),
            "metrics": packing(self.metrics, wait=wait),
            "added": packing(self.added, wait=wait),
        }


class OutputExchange:
    """Exchanges the outputs of a step between processes.

    Args:
        control: the connection to the other processes.
        device: the device of the stages.
        events: of that device.
    """

    def __init__(self, control: Control, device: torch.device, events: DeviceEvents) -> None:
        self._control, self._device, self._events = control, device, events
        self._local: Part = dict

    @property
    def _deferred(self) -> DeferredResults | None:
        """Where outputs on a device are posted; None on a CPU, and in a single process."""
        return None if self._device.type == "cpu" else self._control.deferred

    def report(self, outputs: StepOutputs) -> Reply:
        """The message with this process's outputs, or the promise to post them, as packing waits for the device."""
        deferred = self._deferred
        wanted: Reply = {} if deferred is None else {"wanted": deferred.wanted()}
        if not outputs:
            return wanted
        if deferred is not None:
            event, ready = outputs.packed_later(self._device, self._events)
            deferred.post(self._control.step, ready)
            self._local = _ready(_LocalOutputs(outputs, event))
        elif isinstance(self._control, Alone):
            self._local = _ready(_LocalOutputs(outputs, None))
        else:
            return {"outputs": outputs.packed()}
        return {"later": True} | wanted

    def parts(self, replies: Sequence[Reply]) -> list[Part]:
        """The outputs of every process, as functions that return them."""
        deferred = self._deferred
        parts = [_ready(reply["outputs"]) for reply in replies if "outputs" in reply]
        for rank, reply in enumerate(replies):
            if "later" in reply and rank == self._control.rank:
                parts.append(self._local)
            elif "later" in reply and deferred is not None:
                parts.append(deferred.result(self._control.step, rank))
        if deferred is not None:
            deferred.forget(self._control.step, [reply["wanted"] for reply in replies])
        return parts


def _ready(outputs: Mapping[str, Any]) -> Part:
    """Outputs that are available already."""
    return _Ready(outputs)


@dataclass(frozen=True)
class _Ready:
    """A class, unlike a lambda, can be pickled."""

    outputs: Mapping[str, Any]

    def __call__(self) -> Mapping[str, Any]:
        return self.outputs


class _LocalOutputs(dict[str, Any]):
    """The outputs of this process, each packed when it is read."""

    def __init__(self, outputs: StepOutputs, event: DeviceEvent | None) -> None:
        self._outputs, self._event = outputs, event

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return vars(self)

    def _wait(self) -> None:
        if (event := self._event) is not None:
            event.wait()
            self._event = None

    def __missing__(self, name: str) -> Any:
        self._wait()
        tensors = getattr(self._outputs, name)
        self[name] = (packing if name in ("metrics", "added") else packing_tensors)(tensors)()
        return self[name]


def _by_stage(stages: Sequence[Stage], name: str) -> Values:
    values: Values = {}
    for stage in stages:
        values.setdefault(stage.index, {}).update(getattr(stage.work, name))
    return values
