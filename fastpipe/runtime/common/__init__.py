"""Utilities for every package of the runtime. It imports no other package of the runtime."""

from __future__ import annotations

from fastpipe.runtime.common.devices import (
    CPU,
    ThreadState,
    cuda_devices,
    located,
    recorded,
    time_when_idle,
    wait_until_done,
    wants_streams,
)
from fastpipe.runtime.common.failure import (
    DIED,
    MAX_TEXT,
    Failure,
    FailureError,
    cause_text,
    failure_of,
    first_line,
    listed,
    logged,
    lost_peer,
)
from fastpipe.runtime.common.guards import ForkGuard, Interrupts, ReentrancyGuard, keep_in_children
from fastpipe.runtime.common.modules import (
    SavedBytes,
    alias_of,
    allocate,
    by_mesh,
    check_grad_dtype,
    check_shapes,
    dense_grad,
    grad_dtype_of,
    has_grad_dtype,
    keep_buffers,
    keep_state,
    on_meta,
    set_grad_dtype,
    tensors_of,
    walked,
    zero_grad_of,
)
from fastpipe.runtime.common.process_groups import process_group
from fastpipe.runtime.common.tensors import (
    Specs,
    Tensors,
    TensorSpec,
    bit_sum,
    bit_sums,
    bytes_of,
    copy_of,
    decoded,
    dense_all,
    digest_of,
    dtype_name,
    dtype_of,
    encoded,
    flat,
    handed_over,
    is_block_mask,
    is_dtensor,
    local_part,
    specs_match,
    specs_of,
    specs_text,
    tensor_leaves,
    tensors_in,
)
from fastpipe.runtime.common.torch_private import children_of, parameters_of, pytree, version_of
from fastpipe.runtime.common.waits import (
    EXIT_SECONDS,
    POLL_SECONDS,
    SHORT_EXIT_SECONDS,
    STORE_SECONDS,
    CircuitBreaker,
    StoreWithTimeout,
    aside,
    attended,
    call_in_thread,
    cloned,
    pauses,
    silent_store,
    waiting,
)
