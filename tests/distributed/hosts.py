"""Several hosts on one machine: processes that take each other to be on another one."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def on_hosts(hosts: str) -> Iterator[None]:
    """Within this context the process is on the host that its rank's letter names: ``"aabb"`` is two and two.

    Which host it is on is asked when a Pipeline is built. An empty text changes nothing.
    """
    if not hosts:
        yield
        return
    os.environ["FASTPIPE_HOST"] = hosts[dist.get_rank()]
    try:
        yield
    finally:
        del os.environ["FASTPIPE_HOST"]
