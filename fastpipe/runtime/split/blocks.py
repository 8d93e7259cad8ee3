"""Modules of which a stage has only a part: a list of blocks, what stands in for the rest, a copy to change."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from fastpipe.runtime.common import children_of, torch_private
from fastpipe.runtime.model import check_forward


class Blocks(nn.ModuleList):
    """In the place of a model's list of blocks: as long, with the blocks of one stage, under their own numbers.

    The model's forward goes through it as through its own list, so that every block gets what the model gives it: the
    mask and the positions that belong to it. Only what goes from block to block is seen to here.

    Args:
        blocks: those of the stage, by number.
        total: how many the model has.

    Attributes:
        hidden: what the next block is to be given. Set before the model's forward to what the previous stage handed on,
            or to None in the first stage; afterwards what this stage hands on.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], total: int) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._total = total
        self._entered = False
        self.hidden: torch.Tensor | None = None

    def begin(self, hidden: torch.Tensor | None) -> None:
        """Before the model's forward.

        Args:
            hidden: what the previous stage handed on; None in the first stage.
        """
        self.hidden = hidden
        self._entered = False

    def __len__(self) -> int:
        return self._total

    def __iter__(self) -> Iterator[Any]:
        return iter(self[:])

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(self._total)[index]]
        return partial(self._run, children_of(self).get(str(range(self._total)[index])))

    def _run(self, block: nn.Module | None, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """A block on what the one before it handed on; one of another stage hands on what it gets."""
        if self._entered and hidden is not self.hidden:
            raise ValueError(
                "split: this model changes what goes from one block to the next between them; hand over its layers as "
                "a list, written so that each takes what the one before it returns"
            )
        self._entered = True
        if self.hidden is None:
            self.hidden = hidden
        if block is not None:
            self.hidden = block(self.hidden, *args, **kwargs)
        return self.hidden


class Absent(nn.Module):
    """In the place of a module of another stage: what comes of it is not used."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """What it is given, or 0 for what is no number of a hidden state."""
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


class Handed(nn.Module):
    """In the place of the embedding of a stage that is given token ids, too: the hidden states of the stage before.

    Attributes:
        value: these.
    """

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """They."""
        assert self.value is not None
        return self.value


def shallow(module: Any) -> Any:
    """A copy with the same children, which may be exchanged.

    Raises:
        ValueError: for a module whose call does not run the forward of its class on the copy.
    """
    check_forward(module)
    twin = copy.copy(module)
    torch_private.set_children(twin, dict(children_of(module)))
    vars(twin).pop("forward", None)
    return twin
