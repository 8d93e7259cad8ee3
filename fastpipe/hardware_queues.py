"""How many queues CUDA makes for what a process gives a device to do, which has to be said before it starts.

Streams that share a queue wait for each other, and streams that carry messages, over NCCL or by copy engines, wait for
other processes: the fewer share a queue the better. CUDA makes eight by itself. Over NCCL a program is proved for fewer
than all (`fastpipe.validate_program`); the copy-engine transport refuses them, since none of its streams may share one.
"""

from __future__ import annotations

import os
import sys

QUEUES = 32
"""As many as there can be."""
_UNLESS_TOLD = 8
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def ask_for_queues() -> None:
    """Have CUDA make all, unless somebody has said how many, or CUDA has started and would not look."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        os.environ.setdefault(VARIABLE, str(QUEUES))


def queues_in_force() -> int:
    """How many CUDA makes, or has made, as far as can be known."""
    found = os.environ.get(VARIABLE, "")
    return min(max(int(found), 1), QUEUES) if found.isdecimal() else _UNLESS_TOLD


def queues_text(count: int) -> str:
    """So many queues, in words."""
    return f"{count} hardware {'queue' if count == 1 else 'queues'}"


def why_too_few() -> str | None:
    """One sentence where CUDA was not told to make all of them."""
    found = os.environ.get(VARIABLE, "")
    if queues_in_force() == QUEUES:
        return None
    remedy = f"set it to {QUEUES}" if found else "import fastpipe before CUDA starts"
    return (
        f"{VARIABLE} is {found or 'not set'}; {remedy}, since streams that wait for other processes must not share a "
        "hardware queue"
    )
