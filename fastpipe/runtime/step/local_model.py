"""What this process holds of the model: its parameters and its state, under the names of the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Self

from torch import nn

from fastpipe.runtime.data_parallel import unwrapped
from fastpipe.runtime.model import Named, Tie, first_names, named_parameters, state_prefix
from fastpipe.runtime.stage import Stage
from fastpipe.runtime.transport import Membership


class LocalModelState:
    """The part of the model that is on this process.

    Attributes:
        stage_modules: its stages, by index.
        schedule: says how many stages there are.
    """

    stage_modules: dict[int, nn.Module]
    schedule: Any
    _ties: Sequence[Tie]
    _member: Membership
    _stages: Sequence[Stage]

    @property
    def rank(self) -> int:
        """This process's rank in the pipeline; 0 when all ranks are here."""
        return self._member.rank

    @property
    def num_stages(self) -> int:
        """How many stages the model is cut into."""
        return int(self.schedule.num_stages)

    @property
    def is_first(self) -> bool:
        """Whether this process has the first stage."""
        return any(stage.is_first for stage in self._stages)

    @property
    def is_last(self) -> bool:
        """Whether this process has the last stage."""
        return any(stage.is_last for stage in self._stages)

    @property
    def needs_input(self) -> bool:
        """Whether `step` uses its positional arguments here."""
        return self.is_first

    @property
    def needs_target(self) -> bool:
        """Whether `step` uses its target, or output gradient, here."""
        return self.is_last

    def parameters(self) -> Iterator[nn.Parameter]:
        """The parameters of this process's stages."""
        for _, parameter in self.named_parameters():
            yield parameter

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The same with their names in the whole model; a tied weight once, under its first name."""
        for named in self._named_parameters():
            yield named.name, named.parameter

    def _named_parameters(self) -> list[Named]:
        return list(named_parameters(self.stage_modules, first_names(self._ties)))

    def state_dict(self) -> dict[str, Any]:
        """The state of this process's stages, under the keys of the whole model."""
        state: dict[str, Any] = {}
        for stage, module in sorted(self.stage_modules.items()):
            own = unwrapped(module)
            state.update(own.state_dict(prefix=state_prefix(own, stage)))
        for tie in self._ties:
            # of tied shards the first is the one that is trained
            first, *others = [name for name in tie.names if name in state] or [""]
            state.update({name: state[first] for name in others})
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the local part of a state under the keys of the whole model.

        Raises:
            KeyError: for a key that is missing; where all stages are here, also for one that no stage has.
            TypeError: for what is no state.
        """
        if not isinstance(state, Mapping):
            raise TypeError(f"state is a {type(state).__name__}: give what state_dict() of the model returns")
        taken: set[str] = set()
        for stage, wrapped in self.stage_modules.items():
            module = unwrapped(wrapped)
            prefix = state_prefix(module, stage)
            own = module.state_dict()
            missing = [prefix + key for key in own if prefix + key not in state]
            if missing:
                raise KeyError(f"the state has no {missing[0]!r}, which stage {stage} needs; its keys are the model's")
            module.load_state_dict({key: state[prefix + key] for key in own})
            taken.update(prefix + key for key in own)
        left = [key for key in state if key not in taken]
        if left and len(self.stage_modules) == self.schedule.num_stages:
            raise KeyError(f"the state has {left[0]!r}, which is of no stage: is it of another model?")

    def train(self, mode: bool = True) -> Self:
        """Put the local stages into training mode, or out of it."""
        for module in self.stage_modules.values():
            module.train(mode)
        return self

    def eval(self) -> Self:
        """Put the local stages into evaluation mode."""
        return self.train(False)
