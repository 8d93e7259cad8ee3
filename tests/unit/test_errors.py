"""The exceptions travel between processes as they are."""

import copy
import pickle

import pytest

from fastpipe import CorruptionError, ScheduleError, StepError

pytestmark = pytest.mark.without_torch


def test_a_step_error_keeps_its_fields_when_it_is_pickled_or_copied() -> None:
    keeps_its_fields(StepError)
    keeps_its_fields(CorruptionError)


def keeps_its_fields(kind: type[StepError]) -> None:
    error = kind("it failed", rank=1, stage=2, action="2F0", microbatch=0, cause="ValueError: no")
    error.add_note("and a note")
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is kind and str(other) == "it failed" and other.__notes__ == ["and a note"]
        assert vars(other) == vars(error)
        assert (other.rank, other.stage, other.action, other.microbatch) == (1, 2, "2F0", 0)
        assert other.cause == "ValueError: no"


def test_what_is_wrong_with_a_schedule_is_a_value_error_elsewhere_too() -> None:
    assert isinstance(pickle.loads(pickle.dumps(ScheduleError("row 1"))), ValueError)
