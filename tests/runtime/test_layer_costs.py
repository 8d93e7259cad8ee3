"""What layers cost, and pipelines that are cut by it."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fastpipe import Pipeline, layer_costs, partition
from tests.runtime.models import CASES, WIDTH, Scaled, Two, squared


def uneven() -> list[nn.Module]:
    """Wide layers at one end."""
    widths = [4, 64, 64, 8, 8, 8, 8, 4]
    return [nn.Linear(a, b, bias=False) for a, b in zip(widths, widths[1:], strict=False)]


def test_parameters_are_counted() -> None:
    layers = [nn.Linear(3, 5), nn.ReLU(), nn.LayerNorm(5)]
    assert layer_costs(layers, by="parameters") == [20, 0, 10]
    assert layer_costs(nn.Sequential(*layers), by="parameters") == [20, 0, 10]


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


def test_tuples_keywords_and_integers_go_from_layer_to_layer() -> None:
    for layers, args, kwargs in [
        ([Two(), Two()], (torch.randn(3, WIDTH),), {}),
        ([Scaled(), nn.Linear(WIDTH, 2)], (torch.randn(3, WIDTH),), {"scale": torch.ones(3, 1)}),
        (CASES["tokens"].layers(3), (torch.randint(11, (4, 3)),), {}),
    ]:
        costs: list[float] = layer_costs(layers, *args, by="flops", **kwargs)
        assert len(costs) == len(layers) and costs[-1] > 0


class Averaging(nn.Module):
    """Puts another tensor in its buffer's place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


def test_nothing_is_left_behind() -> None:
    layers = [nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(), nn.Linear(4, 4), Averaging()]
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
    assert cut(lambda stage: nn.Linear(4, 4)) == ""


@pytest.mark.parametrize("cut", ["3,2,", "-1,4,4", "3;2;2", "Layers"])
def test_a_layout_that_is_none(cut: str) -> None:
    with pytest.raises(ValueError, match=rf"partition = '{cut}': use 'layers', 'parameters', 'flops'"):
        Pipeline(uneven(), "1f1b", 4, squared, num_ranks=3, partition=cut)


@pytest.mark.parametrize("cut", ["3,2,1", "3,2,2,1", "0,3,4"])
def test_no_layer_is_dropped(cut: str) -> None:
    with pytest.raises(ValueError, match="3 numbers .* 7 layers"):
        Pipeline(uneven(), "1f1b", 4, squared, num_ranks=3, partition=cut)
