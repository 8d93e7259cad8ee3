"""examples/fsdp.py: shards of four processes train what one process trains."""

from __future__ import annotations

import re

import pytest

from tests.runtime.examples import losses, run


def test_shards_train_what_one_process_trains() -> None:
    shown, alone = run("fsdp.py", "--steps", "3", processes=4), run("fsdp.py", "--steps", "3")
    assert "replicas: 2; ranks of each: 2" in shown and "replicas: 1" in alone
    for spread, whole in zip(losses(shown), losses(alone), strict=True):
        assert float(spread) == pytest.approx(float(whole), rel=1e-4)
    ((held, total),), ((all_held, same),) = (
        re.findall(r"holds ([\d,]+) of ([\d,]+) parameters", text) for text in (shown, alone)
    )
    assert all_held == same == total
    assert int(held.replace(",", "")) < 0.3 * int(total.replace(",", ""))
    assert re.findall(r"norm of the gradients (\S+)", shown) == re.findall(r"norm of the gradients (\S+)", alone)
