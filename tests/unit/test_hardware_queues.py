"""CUDA is told to make all of its hardware queues, by whoever imports fastpipe before it starts."""

import os
import sys
from types import SimpleNamespace

import pytest

from fastpipe.hardware_queues import ask_for_queues, why_too_few

pytestmark = pytest.mark.without_torch

NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def nobody_has_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "so that it is put back")
    del os.environ[NAME]
    monkeypatch.delitem(sys.modules, "torch", raising=False)


def torch_where_cuda_has(started: bool) -> SimpleNamespace:
    return SimpleNamespace(cuda=SimpleNamespace(is_initialized=lambda: started))


@pytest.mark.parametrize("torch", [None, torch_where_cuda_has(started=False)], ids=["no torch", "torch"])
def test_all_of_them_before_cuda_starts(torch: SimpleNamespace | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch is not None:
        monkeypatch.setitem(sys.modules, "torch", torch)
    ask_for_queues()
    assert os.environ[NAME] == "32"
    assert why_too_few() is None


def test_what_somebody_said_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAME, "1")
    ask_for_queues()
    assert os.environ[NAME] == "1"
    assert str(why_too_few()).startswith(f"{NAME} is 1; set it to 32, since streams")


def test_nothing_is_claimed_once_cuda_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", torch_where_cuda_has(started=True))
    ask_for_queues()
    assert NAME not in os.environ
    assert str(why_too_few()).startswith(f"{NAME} is not set; import fastpipe before CUDA starts, since streams")
