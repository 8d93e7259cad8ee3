"""The native executor over Gloo, in processes of their own; the Pipeline's control plane is not there to help."""

import copy
import os

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch.multiprocessing as multiprocessing  # noqa: E402

from fastpipe.runtime import native  # noqa: E402
from fastpipe.runtime.common.failure import DIED, Failure, FailureError  # noqa: E402
from fastpipe.runtime.executor.executor import NativeExecutor  # noqa: E402
from fastpipe.runtime.stage.losses import StageWork  # noqa: E402
from fastpipe.runtime.stage.stage import Stage  # noqa: E402
from fastpipe.runtime.transport import process_group  # noqa: E402
from fastpipe.runtime.transport.groups import membership  # noqa: E402
from tests.patience import PATIENCE  # noqa: E402
from tests.runtime.native_ranks import lowered, squares  # noqa: E402
from tests.runtime.test_native_core import blocks, data, parameters, unsplit  # noqa: E402
from tests.scripts import SERVER, start_server  # noqa: E402

pytestmark = [pytest.mark.skipif(native.load() is None, reason=native.native_status())]
MICROBATCHES = 4


class Rank:
    """One rank of two, with two stages each."""

    def __init__(self, rank, folder, timeout=PATIENCE):
        torch.set_num_threads(1)
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 2), rank=rank, world_size=2)
        self.rank = rank
        self.program = lowered("dualpipev", 2, MICROBATCHES)
        self.modules = blocks(4)
        mine = self.program.placement.stages_of(rank)
        self.stages = {index: Stage(index, self.modules[index], 4, squares) for index in mine}
        self.reports = []
        self.executor = NativeExecutor(
            self.program,
            rank,
            self.stages,
            process_group.ProcessGroups(membership(None, torch.device("cpu"))),
            on_failure=lambda position, error: self.reports.append((position, error)),
            timeout=timeout,
            num_threads=1,
        )

    def step(self, announce):
        inputs, targets = data(MICROBATCHES)
        for stage in self.stages.values():
            stage.begin(StageWork(args=inputs if stage.is_first else None, targets=targets))
        return self.executor.run(3, announce)

    def gradients_are_those_of(self, reference):
        mine = [p for index in self.stages for p in self.modules[index].parameters()]
        theirs = [p for index in self.stages for p in reference[index].parameters()]
        return all(torch.equal(one.grad, other.grad) for one, other in zip(mine, theirs, strict=True))


def run_two(worker, folder):
    start_server()
    multiprocessing.start_processes(worker, args=(str(folder),), nprocs=2, start_method=SERVER.get_start_method())


def told_of_a_lost_rank(index, folder):
    """As on a device, where streams wait, and are let go when the groups are aborted."""
    rank = Rank(index, folder)
    rank.step(announce=True)
    (check,) = rank.executor.checks
    check()
    transport = rank.executor.transport
    transport.device, transport._all = torch.device("cuda"), list
    transport.unblock(Failure(1, DIED, is_fatal=True))
    with pytest.raises(FailureError, match="did not arrive .rank 1 was lost") as caught:
        check()
    assert caught.value.failure.rank == 1


def failures(index, folder):
    rank = Rank(index, folder)
    armed = [None]

    def maybe_fail(*_):
        if armed[0] is not None:
            raise armed[0]

    if index == 1:
        rank.modules[1].register_forward_pre_hook(maybe_fail)
    # before anything is known, and when all is: the receivers then get zeros, which nobody tells them here
    for announce in (True, False):
        if not announce:
            rank.step(announce=True)
        armed[0] = LookupError("mine")
        if index == 1:
            with pytest.raises(LookupError) as caught:
                rank.step(announce)
            assert caught.value is armed[0]
        else:
            assert (rank.step(announce) is None) == announce
        armed[0] = None
        for p in parameters(rank.modules):
            p.grad = None
        reference = copy.deepcopy(rank.modules)
        unsplit(reference, *data(MICROBATCHES), steps=1)
        rank.step(announce)
        assert rank.gradients_are_those_of(reference)


def a_death(index, folder):
    rank = Rank(index, folder)
    rank.step(announce=True)
    if index == 1:
        os._exit(0)
    with pytest.raises(FailureError, match="rank 1") as caught:
        rank.step(announce=False)
    assert caught.value.failure.rank == 1
    assert len(rank.reports) == 1
    with pytest.raises(FailureError, match="build the Pipeline again"):
        rank.step(announce=False)
    os._exit(0)  # the group cannot be ended in order without its other half


@pytest.mark.parametrize("worker", [told_of_a_lost_rank, failures, a_death])
def test_two_processes(worker, tmp_path):
    run_two(worker, tmp_path)


def test_headers_are_the_same_in_both_languages():
    assert native.load().header_format() == (process_group.HEADER, list(process_group._DTYPES))
