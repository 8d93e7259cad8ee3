"""Pipelines whose messages go through streams that may share a hardware queue: what is run instead, or refused."""

import logging
from dataclasses import fields
from typing import Any

import pytest

import fastpipe
from fastpipe import ProgramError, lower, make_schedule, validate_program
from fastpipe.hardware_queues import VARIABLE

torch = pytest.importorskip("torch")

from fastpipe.runtime.arguments import ExecutionArguments  # noqa: E402
from fastpipe.runtime.step.programs import Programs  # noqa: E402
from fastpipe.runtime.transport import Loopback  # noqa: E402


def programs(schedule: str, lookahead: int | str, lanes: str = "directed", queues: int | None = 1) -> Programs:
    return Programs(schedule, 4, {}, None, lanes, lookahead, queues)


@pytest.fixture(autouse=True)
def one_queue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "1")


@pytest.mark.parametrize("name, asked, proved", [("gpipe", 2, 1), ("1f1b", "all", 1), ("1f1b", 1, 1), ("zbv", 0, 0)])
def test_receives_are_posted_later_where_that_is_proved(
    name: str, asked: int | str, proved: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "fastpipe"):
        program = programs(name, asked).program(8, forward_only=False)
    schedule = make_schedule(name, num_ranks=4, num_microbatches=8)
    assert program.digest() == validate_program(lower(schedule, recv_lookahead=proved), queues=1).digest()
    said = [
        f"recv_lookahead = {asked!r}: {name} can hang where streams share a hardware queue, so it runs with {proved}: "
        f"{VARIABLE} is 1; set it to 32, since streams that wait for other processes must not share a hardware queue"
    ]
    assert caplog.messages == (said if asked != proved else [])


@pytest.mark.parametrize("lanes", ["directed", "coalesced"])
def test_what_is_not_proved_however_receives_are_posted_is_refused(lanes: str) -> None:
    with pytest.raises(
        ProgramError, match=f"schedule = 'looped_bfs': it can hang where .*: {VARIABLE} is 1; set it to 32"
    ):
        programs("looped_bfs", "all", lanes).program(8, forward_only=False)
    programs("looped_bfs", 1, lanes, 32).program(8, forward_only=False)
    programs("looped_bfs", 1, lanes, None).program(8, forward_only=False)


def test_only_streams_of_cuda_between_processes_share_queues(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    monkeypatch.delenv("FASTPIPE_TRANSPORT", raising=False)

    def queues(transport: Any, device: Any, num_processes: int) -> int | None:
        others: dict[str, Any] = dict.fromkeys(field.name for field in fields(ExecutionArguments))
        return ExecutionArguments(**{**others, "transport": transport}).queues(device, num_processes)

    for transport in ("auto", "process_group", "process_group_coalesced"):
        assert queues(transport, cuda, 2) == 1
        assert queues(transport, cpu, 2) is None
    assert queues("auto", cuda, 1) is None
    assert queues("cuda_ipc", cuda, 2) is None
    assert queues(Loopback(), cuda, 1) is None
    monkeypatch.delenv(VARIABLE)
    assert queues("auto", cuda, 2) == 8, "CUDA's own number"


class Twice(torch.nn.Module):
    """Hands on two tensors."""

    def forward(self, x: Any) -> Any:
        return x, x + 1


class Summed(torch.nn.Module):
    """Takes two tensors."""

    def forward(self, x: Any, y: Any) -> Any:
        return x + y


def test_several_tensors_are_refused_as_each_is_a_message_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionArguments, "queues", lambda *_: 1)
    x = torch.ones(4, 2)
    one = fastpipe.Pipeline([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)], "1f1b", 4, torch.nn.MSELoss(), num_ranks=2)
    assert one.step(x, target=x).loss.isfinite()
    assert f"queues      proved for 1 hardware queue ({VARIABLE})" in one.describe()
    two = fastpipe.Pipeline([Twice(), Summed()], "1f1b", 4, torch.nn.MSELoss(), num_ranks=2)
    with pytest.raises(ValueError, match=f"stage 0 returns 2 tensors, and .*: {VARIABLE} is 1; set it to 32"):
        two.step(x, target=x)


def test_within_a_rank_nothing_is_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExecutionArguments, "queues", lambda *_: 1)
    x = torch.ones(4, 2)
    layers = [torch.nn.Linear(2, 2), Twice(), Summed(), torch.nn.Linear(2, 2)]
    pipe = fastpipe.Pipeline(layers, "zbv", 4, torch.nn.MSELoss(), num_ranks=2)
    assert pipe.step(x, target=x).loss.isfinite(), "stages 1 and 2 are on one rank"
