"""Calls in a random order, on a pipeline and on the unsplit model: all bits stay equal, whatever came before."""

import copy
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fastpipe
from fastpipe import Pipeline
from fastpipe.testing import check_parity, reference_step
from tests.runtime.checks import same_bits

WIDTH, RANKS = 8, 2
SCHEDULES = ["1f1b", "interleaved_zb", "zbv", "dualpipe", "dualpipev", "chimera"]


class Block(nn.Module):
    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear, self.dropout = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
        y = torch.tanh(self.linear(self.norm(x))) * self.factor
        return x + self.dropout(y if scale is None else y * scale)


def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return (output - target).square().mean(), {"error": (output - target).abs().mean()}


class InjectedError(Exception):
    pass


class Both:
    """A pipeline and the unsplit model, on which the same is done; one method for each call."""

    def __init__(self, seed: int, executor: str) -> None:
        self.random = random.Random(seed)
        torch.manual_seed(seed)
        layers = [nn.Linear(WIDTH, WIDTH, bias=False), *(Block() for _ in range(7)), nn.Linear(WIDTH, WIDTH)]
        if self.random.random() < 0.5:
            layers[-1].weight = layers[0].weight
        self.models = nn.ModuleList(layers), nn.ModuleList(copy.deepcopy(layers))
        recompute = self.random.choice(["none", "full", "layers"])
        options: dict[str, Any] = {"num_ranks": RANKS, "rng": "per_microbatch", "recompute": recompute}
        schedule = self.random.choice(SCHEDULES)
        self.pipe = Pipeline(layers, schedule, 4, loss_fn, executor=executor, **options)
        self.rng = {"rng": "per_microbatch", "seed": torch.initial_seed(), "partition": self.pipe._local.layer_counts}
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]

    def batch(self) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
        rows = self.random.randint(4, 12)
        kwargs = {"scale": torch.rand(rows, 1) + 0.5} if self.random.random() < 0.3 else {}
        return torch.randn(rows, WIDTH), torch.randn(rows, WIDTH), kwargs

    def same_layer(self) -> list[Block]:
        i = self.random.randint(1, 7)
        return [model[i] for model in self.models]

    def step(self) -> None:
        x, y, kwargs = self.batch()
        count, options = self.pipe.step_count, {"kwargs": kwargs, "ties": self.pipe._local.ties, **self.rng}
        result = self.pipe.step(x, target=y, **kwargs)
        model = list(self.models[1])
        expected = reference_step(model, (x, y), self.pipe.schedule, loss_fn, step_count=count, **options)
        assert same_bits(result.loss, expected.loss)
        assert same_bits(result.metrics["error"], expected.metrics["error"])

    def step_in_bf16(self) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            self.step()

    def failed_step(self) -> None:
        def fail(*_: Any) -> None:
            raise InjectedError

        hook = self.same_layer()[0].register_forward_hook(fail)
        x, y, kwargs = self.batch()
        with pytest.raises(InjectedError):
            self.pipe.step(x, target=y, **kwargs)
        hook.remove()
        for optimizer in self.optimizers:
            optimizer.zero_grad()

    def refused_step(self) -> None:
        x, y, kwargs = self.batch()
        with pytest.raises(ValueError, match="target"):
            self.pipe.step(x, target=y[1:], **kwargs)

    def evaluate(self) -> None:
        x, _, kwargs = self.batch()
        modes = [module.training for module in self.models[1].modules()]
        self.pipe.eval(), self.models[1].eval()
        found = self.pipe.eval_step(x, **kwargs).outputs
        with torch.no_grad():
            parts = [part.tensor_split(4) for part in (x, kwargs.get("scale", torch.ones(len(x), 1)))]
            outputs = []
            for x, scale in zip(*parts, strict=True):
                for layer in self.models[1]:
                    x = layer(x, scale) if isinstance(layer, Block) and kwargs else layer(x)
                outputs.append(x)
        assert same_bits(found, torch.cat(outputs))
        for model in self.models:
            for module, mode in zip(model.modules(), modes, strict=True):
                module.training = mode

    def optimize(self) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self) -> None:
        set_to_none = self.random.random() < 0.5
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def clip(self) -> None:
        if any(p.grad is not None for p in self.models[1].parameters()):
            expected = nn.utils.clip_grad_norm_(self.models[1].parameters(), 0.1)
            assert same_bits(self.pipe.clip_grad_norm_(0.1), expected)

    def change_mode(self) -> None:
        mode = self.random.random() < 0.5
        for layer in self.same_layer():
            layer.train(mode)

    def freeze_or_train(self) -> None:
        trains = self.random.random() < 0.5
        for layer in self.same_layer():
            layer.linear.requires_grad_(trains)

    def change_an_attribute(self) -> None:
        factor = self.random.random() + 0.5
        for layer in self.same_layer():
            layer.factor = factor

    def hook(self) -> None:
        for layer in self.same_layer():
            layer.register_forward_hook(lambda module, args, output: output * 0.75)

    def replace_a_weight(self) -> None:
        value = torch.randn(WIDTH, WIDTH)
        for layer in self.same_layer():
            layer.linear.weight = nn.Parameter(value.clone())
        self.optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in self.models]
        self.zero_grad()

    def load(self) -> None:
        state = {name: value * 0.9 for name, value in self.models[1].state_dict().items()}
        self.pipe.load_state_dict(state), self.models[1].load_state_dict(state)

    def save_and_load(self) -> None:
        with TemporaryDirectory() as folder:
            path = Path(folder) / "checkpoint"
            fastpipe.save_checkpoint(path, self.pipe, self.optimizers[0])
            with torch.no_grad():
                for parameter in self.pipe.parameters():
                    parameter.add_(1)
            self.optimizers[0] = torch.optim.AdamW(self.models[0].parameters(), lr=0.01)
            fastpipe.load_checkpoint(path, self.pipe, self.optimizers[0])

    def profile(self) -> None:
        x, y, kwargs = self.batch()
        self.pipe.profile(x, target=y, num_steps=1, **kwargs)

    def parity(self) -> None:
        x, y, kwargs = self.batch()
        assert check_parity(self.pipe, list(self.models[1]), (x, y), kwargs=kwargs).ok

    def replan(self) -> None:
        names = (
            ["1f1b", "zb_h1", "gpipe"] if self.pipe.num_stages == RANKS else ["zbv", "1f1b_v", "dualpipev", "hanayo"]
        )
        name = self.random.choice(names)
        self.pipe.replan(fastpipe.make_schedule(name, num_ranks=RANKS, num_microbatches=4))
        self.rng["partition"] = self.pipe._local.layer_counts

    def check(self) -> None:
        expected = dict(self.models[1].named_parameters(remove_duplicate=False))
        assert len(list(self.pipe.named_parameters())) == len(list(self.models[1].parameters()))
        for name, parameter in self.pipe.named_parameters():
            assert same_bits(parameter, expected[name]), name
            grads = [p.grad for p in (parameter, expected[name]) if p.grad is not None]
            assert not grads or (len(grads) == 2 and same_bits(*grads)), name


CALLS = sorted(name for name, value in vars(Both).items() if callable(value) and name[0] != "_")
CALLS = [name for name in CALLS if name not in ("batch", "same_layer", "check")]


def run(seed: int, calls: list[str], executor: str) -> None:
    both = Both(seed, executor)
    for call in [*calls, "step"]:
        getattr(both, call)()
        both.check()


CASES = given(st.integers(0, 2**16), st.lists(st.sampled_from(CALLS), max_size=8))
FEW = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))


@FEW
@CASES
def test_calls_in_any_order(executor: str, seed: int, calls: list[str]) -> None:
    run(seed, calls, executor)


@pytest.mark.nightly
@settings(FEW, max_examples=600)
@CASES
def test_many_calls_in_any_order(executor: str, seed: int, calls: list[str]) -> None:
    run(seed, calls, executor)
