"""Losses, metrics and added losses of a step, gathered over the ranks.

On a device they are there later than the host ends the step; `fastpipe.runtime.executor.events` says whether they
can be trusted.
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
"""What one process found, as `StepOutputs.packed` has it."""


@dataclass(frozen=True)
class StepOutputs:
    """Losses, metrics and what stages added, where they were computed.

    Attributes:
        losses: by microbatch, as the loss function returned them.
        scaled: the same as shares in the loss of the batch.
        metrics: by stage and microbatch.
        added: the same of the losses that stages added.
    """

    losses: dict[int, torch.Tensor]
    scaled: dict[int, torch.Tensor]
    metrics: Values
    added: Values

    @classmethod
    def on(cls, stages: Sequence[Stage]) -> StepOutputs:
        """By local stages in the step that has just run; of two holders in this process, by both."""
        losses, scaled = (
            {i: loss for stage in stages for i, loss in getattr(stage.work, name).items()}
            for name in ("losses", "scaled")
        )
        return cls(losses, scaled, _by_stage(stages, "metrics"), _by_stage(stages, "added"))

    def __bool__(self) -> bool:
        return bool(self.losses or any(self.metrics.values()) or any(self.added.values()))

    def packed(self) -> Reply:
        """As JSON, to the last bit; of a device the host waits for it."""
        return {name: pack() for name, pack in self._packing(wait=True).items()}

    def packed_later(self, device: torch.device, events: DeviceEvents) -> tuple[DeviceEvent, Callable[[], Reply]]:
        """When it will be there, and the same for a thread that does nothing else to call: nothing waits until then."""
        packing = self._packing(wait=False)
        copied = events.make(device)

        def ready() -> Reply:
            # a thread begins on the first device, on which the call would make this process a context
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
    """Tells the other processes what a step found here, and learns what they found.

    Args:
        control: the way to the other processes.
        device: what the stages compute on.
        events: of what it computes.
    """

    def __init__(self, control: Control, device: torch.device, events: DeviceEvents) -> None:
        self._control, self._device, self._events = control, device, events
        self._here: Part = dict

    @property
    def _deferred(self) -> DeferredResults | None:
        """Where what is on a device goes; None where nothing waits for one, or there is nobody to tell."""
        return None if self._device.type == "cpu" else self._control.deferred

    def tell(self, found: StepOutputs) -> Reply:
        """What this process found, or that it will tell: to pack it is to wait for the device."""
        deferred = self._deferred
        wanted: Reply = {} if deferred is None else {"wanted": deferred.wanted()}
        if not found:
            return wanted
        if deferred is not None:
            moment, ready = found.packed_later(self._device, self._events)
            deferred.post(self._control.step, ready)
            self._here = _given(_Here(found, moment))
        elif isinstance(self._control, Alone):
            self._here = _given(_Here(found, None))
        else:
            return {"found": found.packed()}
        return {"later": True} | wanted

    def parts(self, replies: Sequence[Reply]) -> list[Part]:
        """What every process found, to be asked for."""
        deferred = self._deferred
        parts = [_given(reply["found"]) for reply in replies if "found" in reply]
        for rank, reply in enumerate(replies):
            if "later" in reply and rank == self._control.rank:
                parts.append(self._here)
            elif "later" in reply and deferred is not None:
                parts.append(deferred.result(self._control.step, rank))
        if deferred is not None:
            deferred.forget(self._control.step, [reply["wanted"] for reply in replies])
        return parts


def _given(found: Mapping[str, Any]) -> Part:
    """What is here already."""
    return _Given(found)


@dataclass(frozen=True)
class _Given:
    """A class, so that results can be pickled."""

    found: Mapping[str, Any]

    def __call__(self) -> Mapping[str, Any]:
        return self.found


class _Here(dict[str, Any]):
    """What was found in this process: packed when it is asked for, each by itself."""

    def __init__(self, found: StepOutputs, moment: DeviceEvent | None) -> None:
        self._found, self._moment = found, moment

    def __getstate__(self) -> dict[str, Any]:
        self._wait()
        return vars(self)

    def _wait(self) -> None:
        if (moment := self._moment) is not None:
            moment.wait()
            self._moment = None

    def __missing__(self, name: str) -> Any:
        self._wait()
        tensors = getattr(self._found, name)
        self[name] = (packing if name in ("metrics", "added") else packing_tensors)(tensors)()
        return self[name]


def _by_stage(stages: Sequence[Stage], name: str) -> Values:
    values: Values = {}
    for stage in stages:
        values.setdefault(stage.index, {}).update(getattr(stage.work, name))
    return values
