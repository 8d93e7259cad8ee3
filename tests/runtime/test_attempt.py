"""Processes of one attempt find each other among the keys of earlier ones, and those of another job are refused."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from fastpipe.runtime.common import FailureError
from fastpipe.runtime.coordination import check_job, name_attempt
from tests.patience import PATIENCE

SIZE = 3


def names(store: dist.Store, ranks: list[int]) -> list[str]:
    """The names that ranks agree on, each in a thread."""
    with ThreadPoolExecutor(SIZE) as pool:
        return list(pool.map(lambda rank: name_attempt(store, rank, SIZE, PATIENCE), ranks))


def test_each_attempt_has_a_name_of_its_own():
    store = dist.HashStore()
    first, second = names(store, [0, 1, 2]), names(store, [2, 0, 1])
    assert len(set(first)) == len(set(second)) == 1 and first[0] != second[0]


def test_words_of_killed_processes_are_not_agreed_on():
    """Ranks 0 and 1 of the first attempt were killed while they waited for rank 2."""
    store = dist.HashStore()
    for rank in (0, 1):
        with pytest.raises(FailureError, match=r"rank [12] did not start within 0.05 s"):
            name_attempt(store, rank, SIZE, 0.05)
    assert len(set(names(store, [2, 1, 0]))) == 1


def test_another_job_is_refused_by_both_names(monkeypatch):
    store = dist.HashStore()
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "mine")
    check_job(store)
    check_job(store)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "theirs")
    with pytest.raises(ValueError, match=r"29500.*=theirs.*=mine; give each job a port"):
        check_job(store)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(ValueError, match=r"the job no name.*=mine"):
        check_job(store, decides=False)
    check_job(store, decides=True)
    check_job(store, decides=False)
