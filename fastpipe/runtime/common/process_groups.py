"""Process groups as a user gives them, to the pipeline and to data parallelism: neither package may use the other."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def process_group(given: Any, argument: str, dimension: str) -> Any:
    """A process group that a user gives, or that of a DeviceMesh of one dimension; None stays None.

    Args:
        argument: the name of what was given.
        dimension: an example of a mesh's dimension.

    Raises:
        TypeError: for another type.
        ValueError: for a mesh of several dimensions.
    """
    if given is None or isinstance(given, dist.ProcessGroup):
        return given
    if not hasattr(given, "mesh_dim_names"):
        raise TypeError(
            f"{argument} is a {type(given).__name__}: give a process group that this process is in, or a DeviceMesh of "
            f"one dimension, for example mesh[{dimension!r}]"
        )
    if given.ndim != 1:
        raise ValueError(
            f"{argument}: the DeviceMesh has {given.ndim} dimensions; give one of them, for example mesh[{dimension!r}]"
        )
    return given.get_group()
