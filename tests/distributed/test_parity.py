"""check_parity where every rank is a process: the same table everywhere, wherever the model is."""

from typing import Any

import torch.distributed as dist

from fastpipe import check_parity
from fastpipe.runtime.stage.stage import Chain
from fastpipe.testing import Fault
from tests.conftest import executors_in_turn
from tests.distributed.ranks import GroupOf, on_ranks
from tests.distributed.test_step import batch, pipeline, refuses
from tests.runtime.models import CASES


def check(schedule: str, executor: str, with_model: list[int]) -> list[Any]:
    rank = dist.get_rank()
    pipe = pipeline(executor, schedule)
    model = CASES["plain"].layers(8)
    given = model if rank in with_model else None
    good = check_parity(pipe, given, batch())
    model[5].linear.weight.data *= 1.001
    bad = check_parity(pipe, given, batch())
    assert all(p.grad is None for p in pipe.parameters())
    return [good.ok, good.num_compared, str(good), bad.ok, str(bad), [d.name for d in bad.differences]]


@executors_in_turn("schedule, with_model", [("1f1b", [0, 1]), ("zbv", [1]), ("dualpipe", [0])])
def test_every_rank_gets_the_same_table(schedule: str, with_model: list[int], executor: str, group_of: GroupOf) -> None:
    zero, one = group_of(2).run(check, schedule, executor, with_model)
    assert zero == one
    ok, count, text, still_ok, worse, names = zero
    assert ok and count == 16 and not still_ok and "16 gradients are those of the unsplit model" in text
    assert names[0] == "5.linear.weight" and {f"{i}.linear.bias" for i in range(8)} <= set(names)
    assert "parameter  5.linear.weight" in worse


@on_ranks(2)
def test_whoever_cannot_compare_is_an_error_for_all() -> None:
    rank, pipe = dist.get_rank(), pipeline()
    x, y = batch()
    model = CASES["plain"].layers(8)
    broken = [*model[:7], Fault(model[7], at_call=1, error=OverflowError("too large"))]
    refuses(lambda: check_parity(pipe, None, (x, y)), "model is None on every rank")
    refuses(lambda: check_parity(pipe, model, (iter([x]) if rank else x, y)), "batch has an iterator", on=1)
    refuses(lambda: check_parity(pipe, broken if rank else model, (x, y)), "too large", on=1, kind=OverflowError)
    other = Chain(dict(enumerate(model[rank:])))
    said = "model has 14 parameters but the pipeline has 16"
    refuses(lambda: check_parity(pipe, other, (x, y)), said, on=1)
    assert check_parity(pipe, model, (x, y)).ok
