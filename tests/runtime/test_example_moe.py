"""examples/moe.py: all-to-alls beside the other direction's work change no bit, and spread experts are the experts."""

import importlib
import re
from typing import Any

import pytest
import torch

from fastpipe import AddedLosses, Pipeline
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits, unequal
from tests.runtime.examples import REPOSITORY, losses, run

STEPS = ["--steps", "3"]
NORM = re.compile(r"norm (\d+\.\d+)")
SENT = r"all-to-alls of this process: (\d+), of which (\d+) crossed"


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(REPOSITORY / "examples")
    return importlib.import_module("moe_model")


def test_four_processes_train_alike_with_and_without_overlap() -> None:
    shown, plain = run("moe.py", *STEPS, processes=4), run("moe.py", *STEPS, "--plain", processes=4)
    alone = run("moe.py", *STEPS)
    assert "4 a process" in shown and "8 a process" in alone
    assert losses(shown) == losses(plain), "to the last digit that is printed"
    for spread, whole in zip(losses(shown), losses(alone), strict=True):
        assert float(spread) == pytest.approx(float(whole), rel=1e-4)
    # every expert counts once, wherever it is
    assert len(NORM.findall(shown)) == 3
    for spread, whole in zip(NORM.findall(shown), NORM.findall(alone), strict=True):
        assert float(spread) == pytest.approx(float(whole), abs=0.002)
    ((flights, covered),), ((all_plain, none),) = (re.findall(SENT, text) for text in (shown, plain))
    assert flights == all_plain and none == "0" and 0 < int(covered) < int(flights)


def batch(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    text = torch.randint(model.VOCABULARY, (8, model.CONTEXT + 1), generator=torch.Generator().manual_seed(1))
    return text[:, :-1], text[:, 1:]


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


@pytest.mark.parametrize("schedule", ["dualpipev", "1f1b_overlap"])
def test_the_method_is_the_forward_and_the_backward(model: Any, schedule: str, executor: str) -> None:
    count = 4 if schedule == "dualpipev" else 2
    layers = [model.OverlappedPart(index, count, None) for index in range(count)]
    pipe = Pipeline(layers, schedule, 8, loss_fn, num_ranks=2, executor=executor)
    unsplit = torch.nn.Sequential(*(model.Part(index, count, None) for index in range(count)))
    x, y = batch(model)
    for _ in range(2):
        result = pipe.step(x, target=y)
        reference = reference_step(unsplit, (x, y), pipe.schedule, loss_fn)
        assert same_bits(result.loss, reference.loss) and not unequal(pipe, unsplit)
        assert same_bits(result.added_losses["balance"], reference.added_losses["balance"])
    links = [layer.link for layer in layers]
    assert sum(link.num_covered for link in links) > 0 and all(link.beside is None for link in links)
    assert "by their own overlapped_forward_backward" in pipe.describe()


def test_pieces_of_a_forward_are_the_forward(model: Any) -> None:
    part = model.Part(0, 2, None)
    x, _ = batch(model)
    pieces = model.Pieces(part.pieces(x))
    flights = []
    while pieces.output is None:
        pieces.advance()
        flights.append(part.link.num_flights)
    assert flights == [1, 2, 2]
    pieces.advance()
    with AddedLosses() as added:
        assert same_bits(pieces.finish(), part(x))
    assert len(added.values) == 2 and same_bits(*(value for _, value in added.values))
