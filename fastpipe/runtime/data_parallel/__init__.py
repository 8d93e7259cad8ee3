"""Data parallelism of a stage within a step: DistributedDataParallel or fully_shard.

Promises: gradients are averaged over the replicas once per step, also if the backward is split.
Uses: `common`.
"""

from __future__ import annotations

from fastpipe.runtime.data_parallel.fsdp import Sharded, is_sharded
from fastpipe.runtime.data_parallel.interface import DataParallel, others_in, same_text, wait_for
from fastpipe.runtime.data_parallel.wrappers import (
    check_not_peers,
    check_not_sharded,
    check_parallel,
    find_data_parallel,
    replicate,
    unwrapped,
)
