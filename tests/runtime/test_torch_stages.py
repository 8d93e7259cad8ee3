"""Models that torch.distributed.pipelining traced, as they are: against the model that was traced."""

import copy
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining import SplitPoint, pipe_split, pipeline

from fastpipe import Pipeline, check_parity
from fastpipe.testing import reference_step
from tests.runtime.checks import same_bits
from tests.runtime.models import squared
from tests.runtime.traced_models import WIDTH, Sharing, Skipping, traced

ROWS, COUNT = 16, 8


def skipping() -> nn.Module:
    torch.manual_seed(0)
    return Skipping()


def batch() -> tuple[Any, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, shift, y = torch.randn(3, ROWS, WIDTH, generator=generator)
    return (x, shift), y


def pipe_of(model: nn.Module, schedule: str = "1f1b", **options: Any) -> Pipeline:
    given = traced(model, torch.randn(2, WIDTH), torch.randn(2, WIDTH))
    return Pipeline(given, schedule, COUNT, squared, **{"num_ranks": 4, **options})


@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("1f1b", 4), ("zbv", 2), ("dualpipev", 2), ("interleaved_1f1b", 2)]
)
def test_a_traced_model_trains_as_the_model(schedule: str, num_ranks: int, executor: str) -> None:
    model = skipping()
    pipe = pipe_of(copy.deepcopy(model), schedule, num_ranks=num_ranks, executor=executor)
    inputs, y = batch()
    for _ in range(2):
        result = pipe.step(*inputs, target=y)
        expected = reference_step(model, (inputs, y), pipe.schedule, squared)
        assert same_bits(result.loss, expected.loss)
    grads = dict(pipe.named_parameters())
    assert grads.keys() == dict(model.named_parameters()).keys()
    assert all(same_bits(grads[name].grad, parameter.grad) for name, parameter in model.named_parameters())
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert same_bits(pipe.state_dict()["norm.running_var"], model.state_dict()["norm.running_var"])


def test_a_traced_model_on_two_routes_is_copied(executor: str) -> None:
    model = skipping()
    pipe = pipe_of(copy.deepcopy(model), "dualpipe", executor=executor)
    inputs, y = batch()
    assert check_parity(pipe, model, (inputs, y)).ok


def test_a_weight_of_two_traced_stages_is_tied(executor: str) -> None:
    torch.manual_seed(0)
    model = Sharing()
    given = traced(copy.deepcopy(model), torch.randn(2, WIDTH))
    pipe = Pipeline(given, "1f1b", COUNT, squared, num_ranks=2, executor=executor)
    (x, _), y = batch()
    pipe.step(x, target=y)
    reference_step(model, (x, y), pipe.schedule, squared)
    found = dict(pipe.named_parameters())
    assert list(found) == ["0.scale", "0.layers.0.weight", "0.layers.0.bias", "1.layers.1.weight", "1.layers.1.bias"]
    for name, parameter in found.items():
        grad = model.get_parameter(name.partition(".")[2]).grad
        assert grad is not None and torch.allclose(parameter.grad, grad, rtol=1e-5, atol=1e-7), name
    assert "0.scale = 1.scale" in pipe.describe()
    parity = check_parity(pipe, model, (x, y))
    assert {d.name for d in parity.differences} <= {"", "0.scale"} and all(
        d.relative < 1e-5 for d in parity.differences
    )
    assert parity.ok or "has one name in the model" in str(parity)


class Renamed(nn.Module):
    """One weight under three names: the first stage reads two of them, the last stage one."""

    def __init__(self, order: tuple[str, ...]) -> None:
        super().__init__()
        weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 2)
        for name in order:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
            self.get_submodule(name).weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.early(self.first(x).tanh()).tanh()
        pipe_split()
        return self.last(x)


@pytest.mark.parametrize("order", list(itertools.permutations(["first", "early", "last"])))
def test_a_weight_under_several_names_stays_one(order: tuple[str, ...]) -> None:
    """Of those names torch copies the first in each stage, also one that the stage never reads."""
    torch.manual_seed(0)
    model = Renamed(order)
    (x, _), y = batch()
    pipe = Pipeline(traced(copy.deepcopy(model), x[:2]), "1f1b", COUNT, squared, num_ranks=2)
    assert len(list(pipe.parameters())) == len(list(model.parameters())) == 4
    assert pipe.state_dict().keys() == model.state_dict().keys()
    optimizer = torch.optim.SGD(pipe.parameters(), lr=0.1)
    for _ in range(2):
        parity = check_parity(pipe, model, (x, y))
        assert parity.ok, parity
        pipe.step(x, target=y)
        optimizer.step()
        optimizer.zero_grad()
        model.load_state_dict(pipe.state_dict())
        assert all(
            torch.equal(value, model.first.weight) for key, value in pipe.state_dict().items() if "weight" in key
        )


class Unused(nn.Module):
    """Has a layer that only its other mode uses."""

    uses = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.other = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x).tanh()
        pipe_split()
        return self.other(self.last(x)) if self.uses else self.last(x)


def test_a_layer_that_the_trace_does_not_use_is_no_difference() -> None:
    torch.manual_seed(0)
    model = Unused()
    (x, _), y = batch()
    pipe = Pipeline(traced(copy.deepcopy(model), x[:2]), "1f1b", COUNT, squared, num_ranks=2)
    parity = check_parity(pipe, model, (x, y))
    assert parity.ok and parity.num_compared == 4, parity
    model.uses = True
    missing = {d.name for d in check_parity(pipe, model, (x, y)).differences if d.note == "not in the pipeline"}
    assert missing == {"other.weight", "other.bias"}


class OutputIsInput(nn.Module):
    """The weight of the embedding is that of the last layer, under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(ROWS, WIDTH), nn.Linear(WIDTH, ROWS, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.tokens(x).tanh()
        pipe_split()
        return self.head(x)


def test_a_traced_weight_of_two_names_is_one_in_each_stage(executor: str) -> None:
    torch.manual_seed(0)
    model, x = OutputIsInput(), torch.arange(ROWS)
    pipe = Pipeline(pipeline(model, (x[:2],)), "1f1b", COUNT, squared, num_ranks=2, executor=executor)
    assert [name for name, _ in pipe.named_parameters()] == ["tokens.weight"]
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert check_parity(pipe, model, (x, torch.randn(ROWS, ROWS))).ok


def test_a_traced_weight_of_two_names_on_two_routes(executor: str) -> None:
    """The modules of a trace keep their first weights once more, where no step reads them."""
    torch.manual_seed(0)
    model, x = OutputIsInput(), torch.arange(ROWS)
    traced_model = pipeline(copy.deepcopy(model), (x[:2],))
    pipe = Pipeline(traced_model, "dualpipe", COUNT, squared, num_ranks=2, executor=executor)
    assert check_parity(pipe, model, (x, torch.randn(ROWS, ROWS))).ok


class Several(nn.Module):
    """Returns a value twice, one of an earlier stage, and None; a shape is a number in its graph."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> Any:
        first = self.layers[0](x).tanh()
        pipe_split()
        last = self.layers[1](first) / len(x) + shift
        return last, first, last, None


def weighted(outputs: Any, y: torch.Tensor) -> torch.Tensor:
    last, first, again, nothing = outputs
    assert nothing is None
    return squared(last + 2 * first + 3 * again, y)


def test_outputs_and_shapes_are_those_of_the_trace(executor: str) -> None:
    torch.manual_seed(0)
    model = Several()
    given = pipeline(copy.deepcopy(model), (torch.randn(2, WIDTH),), {"shift": torch.randn(2, WIDTH)})
    pipe = Pipeline(given, "1f1b", COUNT, weighted, num_ranks=2, executor=executor)
    (x, shift), y = batch()
    result = pipe.step(x, shift, target=y)
    with torch.no_grad():
        losses = [
            weighted(model(x.chunk(COUNT)[i], shift=shift.chunk(COUNT)[i]), y.chunk(COUNT)[i]) / COUNT
            for i in range(COUNT)
        ]
    assert same_bits(result.loss, sum(losses[1:], losses[0]))
    with pytest.raises(ValueError, match=r"x has the shape \(1, 6\) in a microbatch, and has the shape \(2, 6\) in"):
        pipe.step(x[:-1], shift[:-1], target=y[:-1])
    assert same_bits(pipe.step(x, shift=shift, target=y).loss, result.loss)
    with pytest.raises(ValueError, match="first: no stage's forward takes this"):  # that is a value within the model
        pipe.step(x, shift, first=shift, target=y)


class Scaling(nn.Module):
    """An input that is no tensor, which the trace makes a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x: torch.Tensor, scale: float | None = None) -> torch.Tensor:
        first = self.layers[0](x)
        pipe_split()
        return self.layers[1](first) if scale is None else scale * self.layers[1](first)


@pytest.mark.parametrize("scale", [None, 2.0])
def test_a_number_is_that_of_the_trace(scale: float | None) -> None:
    model, (x, y) = Scaling(), torch.randn(2, 4, WIDTH)
    given = pipeline(copy.deepcopy(model), (x[:2],), {"scale": scale})
    pipe = Pipeline(given, "1f1b", 2, squared, num_ranks=2)
    loss = sum(squared(model(x[i : i + 2], scale), y[i : i + 2]) / 2 for i in (0, 2))
    assert same_bits(pipe.step(x, scale=scale, target=y).loss, loss)
    for other in (3.0, torch.ones(())):
        with pytest.raises(ValueError, match=f"scale .* in a microbatch, and is {scale} in the trace"):
            pipe.step(x, scale=other, target=y)


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "inputs", "message"),
    [
        ("1f1b", 2, 2, "the traced model is of 4 stages but the schedule has 2: use stages_per_rank"),
        ("zbv", 4, 2, "the traced model is of 4 stages but the schedule has 8"),
        ("1f1b", 4, 1, r"takes 2 inputs \(x, shift\); got 1"),
    ],
)
def test_what_does_not_fit_is_refused(schedule: str, num_ranks: int, inputs: int, message: str) -> None:
    (x, shift), y = batch()
    with pytest.raises((ValueError, TypeError), match=message):
        pipe_of(skipping(), schedule, num_ranks=num_ranks).step(*[x, shift][:inputs], target=y)


def test_two_split_points_in_one_place_are_one() -> None:
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3))), torch.randn(8, WIDTH)
    given = pipeline(copy.deepcopy(model), (x[:4],), split_spec={"0": SplitPoint.END, "1": SplitPoint.BEGINNING})
    pipe = Pipeline(given, "1f1b", 2, squared, num_ranks=2)
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert check_parity(pipe, model, (x, x)).ok


def test_ranks_have_as_many_stages_as_the_trace() -> None:
    model, x = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6))), torch.randn(8, WIDTH)
    spec = {str(number): SplitPoint.BEGINNING for number in range(1, 6)}
    given = pipeline(copy.deepcopy(model), (x[:2],), split_spec=spec)
    assert check_parity(Pipeline(given, "interleaved_1f1b", 4, squared, num_ranks=2), model, (x, x)).ok
    with pytest.raises(ValueError, match="is of 6 stages but the schedule has 4: use stages_per_rank"):
        Pipeline(given, "interleaved_1f1b", 4, squared, num_ranks=2, stages_per_rank=2)
    with pytest.raises(ValueError, match="is of 6 stages but the schedule has 8: use stages_per_rank"):
        Pipeline(given, "interleaved_1f1b", 4, squared, num_ranks=4)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(WIDTH)])
def test_a_traced_model_keeps_its_mode(layer: nn.Module) -> None:
    """Also in a copy of a stage; and what the error says works."""
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer, nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    spec = {"2": SplitPoint.BEGINNING}
    # tracing wraps the modules of the spec
    instances = [copy.deepcopy(model).train(mode) for mode in (True, False)]
    traces = [pipeline(instance, (x[:4],), split_spec=spec) for instance in instances]
    trained, evaluated = (Pipeline(trace, "1f1b", 2, squared, num_ranks=2) for trace in traces)
    for stages in (trained, copy.deepcopy(trained.stage_modules[0])):
        with pytest.raises(
            ValueError, match=r"traced in train\(\) mode, and aten.\w+.default of stage 0 .*its .eval\(\)"
        ):
            stages.eval()
    trained.train().step(x, target=x)
    state = trained.state_dict()
    # in evaluation no operator uses num_batches_tracked
    evaluated.load_state_dict({name: state[name] for name in evaluated.state_dict()})
    model.eval().load_state_dict(state)
    assert torch.equal(evaluated.eval().eval_step(x, target=x).outputs, torch.cat([model(x[:4]), model(x[4:])]))
    if isinstance(layer, nn.Dropout):
        with pytest.raises(ValueError, match="traced in eval"):
            evaluated.train()
    else:  # it may be frozen
        evaluated.train()


def test_dropout_of_nothing_has_no_mode() -> None:
    model, x = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0), nn.Linear(WIDTH, WIDTH)), torch.randn(8, WIDTH)
    pipe = Pipeline(pipeline(model, (x[:4],), split_spec={"2": SplitPoint.BEGINNING}), "1f1b", 2, squared, num_ranks=2)
    assert torch.equal(pipe.eval().eval_step(x, target=x).outputs, pipe.train().eval_step(x, target=x).outputs)
