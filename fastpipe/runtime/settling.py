"""Before a step: stages whose replicas are to reduce other parameters than so far, as all of them have to agree.

Only who has such parameters knows of it, and nothing is exchanged between replicas before a step. So the ranks of its
pipeline do as if the step had failed before it began: they come to every meeting of the program and say why. A replica
that makes the step learns of it there, and raises. If all came for the same reason, none has computed anything yet:
they tell their wrappers, and make the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from fastpipe.errors import StepError
from fastpipe.program import Program
from fastpipe.runtime.control import Control, Reply, tell
from fastpipe.runtime.data_parallel import listed
from fastpipe.runtime.failure import Failure, LostError
from fastpipe.runtime.grad_dtype import set_grad_dtype
from fastpipe.runtime.ranks import LocalRanks
from fastpipe.runtime.stage import Stage


def misses(stages: Sequence[Stage]) -> bool:
    """Whether a stage has parameters to train that its replicas would not reduce.

    Raises:
        ValueError: where that cannot be mended.
    """
    found = []
    for stage in stages:
        if stage.parallel is not None:
            stage.parallel.check_covers(stage.module, stage.index)
            found.append(stage.parallel.missed())
    for stage in stages:
        names = [name for name, p in stage.module.named_parameters() if p.requires_grad] if stage.bare else []
        if names:
            raise ValueError(
                f"data_parallel: stage {stage.index} had no parameters when the Pipeline was built, so it has no "
                f"DistributedDataParallel, and now {listed(names)} are to be trained; build the Pipeline anew"
            )
    return any(found)


def settle(control: Control, ranks: LocalRanks, stages: Sequence[Stage], program: Program) -> None:
    """Have the replicas reduce what is to be trained now. All ranks of the pipeline come here.

    Raises:
        ValueError: when replicas do not train the same; on the other ranks StepError.
        LostError: when another replica does not come.
    """
    outcome = ranks.ask_replicas(program)
    error: BaseException | None = outcome.error
    if error is None:
        try:
            for stage in stages:
                _adopt(stage)
        except Exception as found:  # raised below, when the others have been told
            error = found
    message: Reply = {"lost": outcome.failure is not None}
    replies, refused = tell(partial(control.exchange, "replicas"), message, error)
    if outcome.failure is not None:
        raise LostError(outcome.failure) from error
    if error is not None:
        raise error
    if refused is not None:
        rank, cause = refused
        if replies[rank]["lost"]:
            raise LostError(Failure(rank, cause, dead=True))
        raise StepError(f"rank {rank} refused the step: {cause}", rank=rank, cause=cause)


def _adopt(stage: Stage) -> None:
    renewed = stage.parallel is not None and stage.parallel.adopt()
    if renewed and stage.grad_dtype is not None:
        set_grad_dtype(stage.module, stage.grad_dtype)
