"""What layers cost, and pipelines that are cut by parameters, FLOPs, seconds or memory."""

import copy
import itertools
import logging
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, layer_costs, partition, split
from fastpipe.testing import reference_step
from tests.runtime.checks import assert_same
from tests.runtime.decoders import assert_like, decoder, padded_batch
from tests.runtime.models import squared
from tests.runtime.test_buffers import Replaces

WIDTHS = [4, 64, 64, 8, 8, 8, 8, 4]


def uneven() -> list[nn.Module]:
    """Wide layers at one end."""
    torch.manual_seed(0)
    return [nn.Linear(a, b, bias=False) for a, b in itertools.pairwise(WIDTHS)]


@pytest.mark.parametrize("by", ["flops", "seconds", "memory"])
def test_a_pipeline_is_cut_by_its_example(by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = itertools.accumulate(itertools.repeat(1.0))
    if by == "seconds":
        monkeypatch.setattr("fastpipe.runtime.model.cuts.time_when_idle", lambda devices: next(clock))
    layers, unsplit = uneven(), nn.Sequential(*uneven())
    example = torch.randn(3, 4)
    costs = layer_costs(layers, example, by=by)
    pipe = Pipeline(layers, "1f1b", 3, nn.functional.mse_loss, num_ranks=3, partition=by, example=example)
    counts = [len(list(pipe.stage_modules[stage].children())) for stage in range(3)]
    parts = partition(costs, 3)
    assert counts == [len(part) for part in parts] and sum(counts) == len(layers)
    sums = [sum(costs[layer] for layer in part) for part in parts]
    assert max(sums) == min(
        max(sum(costs[:a]), sum(costs[a:b]), sum(costs[b:])) for a, b in itertools.combinations(range(1, 7), 2)
    )
    unit = {"flops": "FLOPs", "seconds": "seconds", "memory": "bytes"}[by]
    excess = max(sums) * 3 / sum(sums) - 1
    assert f"stage {sums.index(max(sums))} has most {unit}, {excess:.1%} above the mean" in pipe.describe()
    x, y = torch.randn(7, 4), torch.randn(7, 4)
    result = pipe.step(x, target=y)
    assert_same(pipe, result, unsplit, reference_step(unsplit, (x, y), pipe.schedule, nn.functional.mse_loss))


def test_several_arguments_are_a_tuple() -> None:
    class Add(nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    layers = [Add(), *uneven()]
    example = (torch.randn(2, 4), torch.randn(2, 4))
    pipe = Pipeline(layers, "gpipe", 2, nn.functional.mse_loss, num_ranks=2, partition="flops", example=example)
    assert "layers 0-2 | 3-7" in pipe.describe()


def test_memory_is_parameters_twice_and_activations() -> None:
    layers = [nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False).requires_grad_(False), nn.Tanh()]
    rows = 5
    # a frozen layer keeps nothing for its weight, and has no gradient; tanh keeps its result
    assert layer_costs(layers, torch.randn(rows, 4), by="memory") == [4 * (2 * 32 + rows * 4), 4 * 16, 4 * rows * 2]


def test_flops_are_counted_without_computing() -> None:
    class Refuses(torch.autograd.Function):
        """Says that it was computed with."""

        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            assert isinstance(x, torch._subclasses.FakeTensor)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
            return grad

    class Layer(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Refuses.apply(super().forward(x))  # type: ignore[no-any-return, no-untyped-call]

    rows = 3
    assert layer_costs([Layer(4, 4), Layer(4, 4)], torch.randn(rows, 4)) == [4 * rows * 16, 6 * rows * 16]
    wide = [nn.Linear(200_000, 200_000, device="meta"), nn.Linear(200_000, 4, device="meta")]
    example = torch.empty(rows, 200_000, device="meta")
    assert layer_costs(wide, example) == [4.0 * rows * 200_000**2, 6.0 * rows * 200_000 * 4]


def test_flops_of_layers_that_look_at_values_are_counted_in_a_run(caplog: pytest.LogCaptureFixture) -> None:
    class Looks(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) if x.sum() > 0 else x

    layers = [Looks(4, 4), nn.Linear(4, 4)]
    with caplog.at_level(logging.INFO, "fastpipe"):
        assert layer_costs(layers, torch.ones(3, 4)) == [2 * 96, 3 * 96]
        assert layer_costs(layers, -torch.ones(3, 4)) == [0, 2 * 96]
    assert "counted in a real run" in caplog.text


def test_decoders_are_cut_by_what_their_layers_cost() -> None:
    """The embedding is free of FLOPs, and a block is more than the head."""
    model = decoder("llama")
    unsplit = copy.deepcopy(model)
    layers = split(model)
    ids, mask, _ = padded_batch(9)
    costs = layer_costs(layers, ids[:2], attention_mask=mask[:2])
    assert costs[0] == 0 and len(set(costs[1:-1])) == 1 and costs[1] > costs[-1] > 0
    options = {"loss_reduction": layers.num_tokens}
    pipe = Pipeline(layers, "1f1b", 4, layers.loss_fn, num_ranks=3, partition="flops", example=ids[:2], **options)
    assert "partition   layers 0-2 | 3-4 | 5-7; stage 2 has most FLOPs" in pipe.describe()
    assert_like(pipe, unsplit, 9)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"partition": "flops"}, "partition = 'flops': pass one microbatch as example="),
        ({"partition": "layers", "example": torch.ones(2, 4)}, "example is passed but partition = .layers. "),
        ({"example": torch.ones(2, 4)}, "example .* partition = .layers.*: omit it, or .*.flops., .seconds., .memory."),
        ({"partition": "time"}, "partition = 'time': use 'layers', 'parameters', 'flops', 'seconds', 'memory', or the"),
        (
            {"partition": "flops", "example": torch.ones(2, 4), "num_ranks": 8},
            "stages has 7 layers but the schedule has 8",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Pipeline(uneven(), "1f1b", 2, nn.functional.mse_loss, **{"num_ranks": 2, **options})


@pytest.mark.parametrize(
    "options",
    [
        {"partition": "flops", "example": torch.ones(2, 4)},
        {"partition": "parameters"},
        {"partition": [1, 1]},
    ],
)
def test_stages_that_are_cut_already_are_refused(options: dict[str, Any]) -> None:
    stages = dict(enumerate(uneven()[:2]))
    for given in (stages, stages.__getitem__):
        with pytest.raises(ValueError, match="these stages are cut already"):
            Pipeline(given, "1f1b", 2, None, num_ranks=2, **options)


def test_parameters_are_counted() -> None:
    layers = [nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5)]
    assert layer_costs(layers, by="parameters") == [20, 0, 10]
    assert layer_costs(nn.Sequential(*layers), by="parameters") == [20, 0, 10]
    assert layer_costs(nn.Sequential(*layers).children(), by="parameters") == [20, 0, 10]  # type: ignore[arg-type]


def test_a_keyword_argument_that_no_layer_takes_is_refused() -> None:
    with pytest.raises(ValueError, match="maks: no layer's forward takes this keyword argument"):
        layer_costs([nn.Linear(4, 8)], torch.ones(2, 4), maks=None)


def test_flops_are_those_of_forward_and_backward() -> None:
    """A product forward, and two backward: the first layer's input needs no gradient."""
    layers = [nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2), nn.Linear(2, 2).requires_grad_(False)]
    rows = 5
    costs = layer_costs(layers, torch.randn(rows, 4), by="flops")
    product = [2 * rows * 4 * 8, 2 * rows * 8 * 2, 2 * rows * 2 * 2]
    assert costs == [2 * product[0], 0, 3 * product[1], 2 * product[2]]


def test_what_is_kept_for_the_backward() -> None:
    class Twice(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x * x).exp()

    rows = 16
    costs = layer_costs([nn.Linear(4, 8), Twice(), nn.Identity()], torch.randn(rows, 4), by="activation_bytes")
    # the linear its input; the square its input, once, and the exponential its result
    assert costs == [4 * rows * 4, 2 * 4 * rows * 8, 0]


class Takes(nn.Module):
    """Takes so many seconds by a clock of its own; the first call is slow, and one is disturbed."""

    def __init__(self, clock: list[float], seconds: float) -> None:
        super().__init__()
        self.clock, self.seconds, self.calls = clock, seconds, 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.clock[0] += self.seconds + {1: 100.0, 3: 10.0}.get(self.calls, 0.0)
        return x


def test_seconds_are_a_median_after_a_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("fastpipe.runtime.model.cuts.time_when_idle", lambda devices: clock[0])
    layers = [Takes(clock, 0.25), Takes(clock, 2.0)]
    assert layer_costs(layers, torch.ones(1), by="seconds") == [0.25, 2.0]
    monkeypatch.undo()
    assert layer_costs([nn.Linear(4, 4)], torch.ones(2, 4), by="seconds")[0] > 0


def test_nothing_is_left_behind() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Replaces(4)]
    layers[0].weight.grad = torch.ones(4, 4)
    x = torch.randn(6, 4, requires_grad=True)
    before = copy.deepcopy(nn.Sequential(*layers).state_dict())
    state = torch.get_rng_state()
    for by in ("flops", "seconds", "activation_bytes"):
        layer_costs(layers, x, by=by)
    assert torch.equal(torch.get_rng_state(), state) and x.grad is None
    assert torch.equal(layers[0].weight.grad, torch.ones(4, 4)) and layers[3].weight.grad is None
    assert all(torch.equal(value, before[key]) for key, value in nn.Sequential(*layers).state_dict().items())


@pytest.mark.parametrize(
    ("layers", "args", "options", "text"),
    [
        ([], (), {"by": "parameters"}, "layers is empty"),
        ([nn.ReLU()], (), {}, "by = 'flops': give one microbatch"),
        ([nn.ReLU()], (torch.ones(1),), {"by": "weight"}, "by = 'weight': use 'parameters', 'flops', 'seconds'"),
    ],
)
def test_wrong_arguments(layers: list[nn.Module], args: tuple[Any, ...], options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        layer_costs(layers, *args, **options)


def counts_of(cut: Any, schedule: str = "1f1b") -> list[int]:
    layers = uneven()
    pipe = Pipeline(layers, schedule, 4, squared, num_ranks=3, partition=cut)
    pipe.step(torch.randn(4, 4), target=torch.randn(4, 4))
    assert sorted(pipe.state_dict()) == sorted(nn.Sequential(*layers).state_dict())
    return [len(list(pipe.stage_modules[stage].children())) for stage in range(3)]


def test_a_model_is_cut_as_one_likes() -> None:
    assert counts_of("layers") == [3, 2, 2]
    # 256, 4096, 512, 64, 64, 64, 32 parameters: the largest stage is the second layer alone
    assert counts_of("parameters") == [1, 1, 5]
    assert counts_of("1, 2,4") == counts_of([1, 2, 4]) == [1, 2, 4]
    costs = layer_costs(uneven(), torch.randn(4, 4))
    assert counts_of(partition(costs, 3)) == [1, 1, 5]


def test_describe_says_where_it_is_cut_and_how_unevenly() -> None:
    def cut(layers: Any, **options: Any) -> str:
        text = Pipeline(layers, "1f1b", 4, squared, num_ranks=3, **options).describe()
        return next((line for line in text.splitlines() if line.startswith("partition")), "")

    assert cut(uneven(), partition="parameters") == (
        "partition   layers 0 | 1 | 2-6; stage 1 has most parameters, 141.5% above the mean"
    )
    assert cut([nn.ReLU() for _ in range(3)]) == "partition   layers 0 | 1 | 2; no parameters"
    assert cut([nn.Linear(2, 2) for _ in range(3)]) == "partition   layers 0 | 1 | 2; equal parameters in all stages"
    assert cut(lambda stage: nn.Linear(4, 4)) == ""


@pytest.mark.parametrize("cut", ["3,2,", "-1,4,4", "3;2;2", "Layers"])
def test_a_layout_that_is_none(cut: str) -> None:
    with pytest.raises(ValueError, match=rf"partition = '{cut}': use 'layers', 'parameters', 'flops'"):
        Pipeline(uneven(), "1f1b", 4, squared, num_ranks=3, partition=cut)


@pytest.mark.parametrize("cut", ["3,2,1", "3,2,2,1", "0,3,4"])
def test_no_layer_is_dropped(cut: str) -> None:
    with pytest.raises(ValueError, match="3 numbers .* 7 layers"):
        Pipeline(uneven(), "1f1b", 4, squared, num_ranks=3, partition=cut)
