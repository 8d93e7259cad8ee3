"""Which processes belong together: those of one job, and of one attempt of a launcher that restarts them.

torchrun's agent keeps one store for all attempts (``TORCHELASTIC_USE_AGENT_STORE``). So a restarted process finds the
keys of its killed predecessors there, such as the addresses of Gloo's connections, and connects to those
(`docs/reliability.md`). `name_attempt` makes a prefix that no earlier attempt has used. The count of restarts is not
one: two agents count separately.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import time
from typing import Any

from fastpipe.runtime.common import lost_peer, waiting

_JOB = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID")


def job_name() -> str:
    """The job of this process, as its launcher names it; empty if it does not."""
    return next((f"{name}={os.environ[name]}" for name in _JOB if os.environ.get(name)), "")


def check_job(store: Any, *, decides: bool | None = None) -> None:
    """Refuse a process that has joined the store of another job.

    Args:
        store: shared by the processes.
        decides: whether this process names the store's job; None: the first one that calls this does.
    """
    own, key = job_name() or "no name", "fastpipe/job"
    if decides:
        store.set(key, own)
        return
    first = (store.compare_set(key, "", own) if decides is None else store.get(key)).decode()
    if first != own:
        raise ValueError(
            f"MASTER_ADDR, MASTER_PORT = {os.environ.get('MASTER_ADDR')}, {os.environ.get('MASTER_PORT')}: this "
            f"process is of the job {own}, and the processes there are of {first}; give each job a port of its own"
        )


def shares_store() -> bool:
    """Whether the store is one that earlier attempts may have written to."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def name_attempt(store: Any, rank: int, size: int, timeout: float) -> str:
    """A name for this attempt, the same on all of its processes and on no others.

    Each process writes a random word. The first rank proposes the list of them until everyone has acknowledged the same
    list; a word of a process that was killed is never acknowledged, and is replaced by that of its successor.

    Args:
        store: shared by the processes, and by those of earlier attempts.

    Raises:
        FailureError: if a process does not come in time.
    """
    own = secrets.token_hex(8)
    words, answers = ([f"fastpipe/{what}/{other}" for other in range(size)] for what in ("attempt", "acknowledged"))
    store.set(words[rank], own)
    for pause in waiting(timeout, lambda: None):
        if rank == 0 and store.check(words):
            store.set("fastpipe/proposed", b",".join(store.multi_get(words)))
        proposed = store.get("fastpipe/proposed").decode() if store.check(["fastpipe/proposed"]) else ""
        if own in proposed.split(",")[rank : rank + 1]:
            store.set(answers[rank], proposed)
            if rank == 0 and store.check(answers) and set(store.multi_get(answers)) == {proposed.encode()}:
                store.set("fastpipe/agreed", proposed)
            if store.check(["fastpipe/agreed"]) and store.get("fastpipe/agreed").decode() == proposed:
                return hashlib.sha1(proposed.encode()).hexdigest()[:16]
        time.sleep(pause)
    missing = [other for other, key in enumerate(words) if not store.check([key])]
    who = f"rank {missing[0]} did not start" if missing else "the ranks did not agree on a start"
    cause = f"{who} within {timeout:g} s; see what it is doing, or set a longer timeout"
    raise lost_peer(cause, next(iter(missing), None))
