"""Parts of a model in a stage: a list with only some blocks, placeholders, and shallow copies."""

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
    """Replaces a model's list of blocks: same length and numbers, with the blocks of one stage only.

    The model's forward iterates over it as over its own list, and gives every block its mask and positions. Only the
    hidden states between blocks are handled here.

    Attributes:
        hidden: input of the next block. Before the model's forward it is the previous stage's output, None in the first
            stage; afterwards this stage's output.
    """

    def __init__(self, blocks: Mapping[int, nn.Module], total: int) -> None:
        super().__init__()
        for number, block in blocks.items():
            self.add_module(str(number), block)
        self._total = total
        self._entered = False
        self.hidden: torch.Tensor | None = None

    def begin(self, hidden: torch.Tensor | None) -> None:
        """Prepare for the model's forward."""
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
        """Run a block on the hidden states; return them unchanged for a block of another stage."""
        if self._entered and hidden is not self.hidden:
            raise ValueError(
                "split: this model changes the hidden states between its blocks; pass its layers as "
                "a list, written so that each takes what the one before it returns"
            )
        self._entered = True
        if self.hidden is None:
            self.hidden = hidden
        if block is not None:
            self.hidden = block(self.hidden, *args, **kwargs)
        return self.hidden


class Placeholder(nn.Module):
    """Replaces a module of another stage, whose output is not used."""

    def forward(self, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the input if it is floating-point, else 0."""
        return x if x.is_floating_point() else torch.zeros((), device=x.device)


class HiddenStates(nn.Module):
    """Replaces the embedding of a stage that also takes token ids: returns the previous stage's hidden states."""

    def __init__(self) -> None:
        super().__init__()
        self.value: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Return the hidden states."""
        assert self.value is not None
        return self.value


def shallow(module: Any) -> Any:
    """A copy with the same children, which may be replaced.

    Raises:
        ValueError: if calling the copy would not run the forward of its class.
    """
    check_forward(module)
    twin = copy.copy(module)
    torch_private.set_children(twin, dict(children_of(module)))
    vars(twin).pop("forward", None)
    return twin
