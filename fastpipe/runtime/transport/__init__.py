"""Moves tensors from rank to rank, in the order of each channel.

Promises: messages of a channel arrive in order; a send's memory may be reused after its wait; a lost peer raises
`FailureError` with its rank.
Uses: `coordination` (which ranks share a host), `common`.
"""

from __future__ import annotations

from fastpipe.runtime.transport.groups import (
    Membership,
    MeshGroups,
    SharedCall,
    drop_side_group,
    gather_messages,
    leave_groups,
    membership,
    ranks_per_host,
    side_group,
)
from fastpipe.runtime.transport.process_group import ProcessGroups
from fastpipe.runtime.transport.shared_memory import CHOICES, select_transport
from fastpipe.runtime.transport.transport import Loopback, Message, Transport, why_not_python
