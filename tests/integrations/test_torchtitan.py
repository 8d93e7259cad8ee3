"""fastpipe.integrations.torchtitan: its Trainer has the losses that it has without a pipeline; the contract."""

import contextlib
import re
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe.integrations.torchtitan import PipelineSchedule, pipeline
from tests.runtime.examples import run


def losses(schedule: str, processes: int, *options: str) -> dict[str, float]:
    """Of training and validation, by step."""
    shown = re.sub(r"\x1b\[[\d;]*m", "", run("torchtitan_llama.py", schedule, *options, processes=processes))
    found = re.findall(r"((?:validate )?step: +\d+)  loss: +(-?\d+\.\d+)", shown)
    return {step: float(loss) for step, loss in found if float(loss) > 0}  # ranks without the last stage print -1


needs_torchtitan = pytest.mark.skipif(
    not find_spec("torchtitan"), reason="torchtitan is not installed: pip install '.[integrations]'"
)


@needs_torchtitan
def test_its_trainer_has_the_losses_that_it_has_without_a_pipeline() -> None:
    alone = losses("1F1B", 1)
    assert len(alone) == 6 + 3 and alone["step:  6"] < alone["step:  1"]
    assert losses("zbv", 2) == pytest.approx(alone, abs=2e-4)


@needs_torchtitan
@pytest.mark.nightly
@pytest.mark.parametrize(("dp", "tp", "schedule"), [(2, 1, "1F1B"), (1, 2, "zbv"), (2, 2, "Interleaved1F1B")])
def test_losses_beside_fsdp_and_tensor_parallelism(dp: int, tp: int, schedule: str) -> None:
    """Against the same without a pipeline."""
    options = ("--dp", str(dp), "--tp", str(tp), "--steps", "3")
    alone = losses("1F1B", dp * tp, *options)
    assert len(alone) == 3 + 2 and alone["step:  3"] < alone["step:  1"]
    assert losses(schedule, 2 * dp * tp, *options) == pytest.approx(alone, abs=2e-4)


class Layers(nn.Module):
    """A model as torchtitan's are: its parts may be absent."""

    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(10, 8)
        self.layers = nn.ModuleDict({str(number): nn.Linear(8, 8) for number in range(6)})
        self.norm = nn.LayerNorm(8)
        self.output = nn.Linear(8, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
        for layer in self.layers.values():
            h = torch.tanh(layer(h))
        h = self.norm(h) if self.norm is not None else h
        return self.output(h) if self.output is not None else h


class OneRank:
    """The parallel dimensions of a pipeline of one rank, whose stages are all here."""

    pp = 1

    def __init__(self, *enabled: str) -> None:
        self.enabled, self.asked = enabled, list[str | list[str]]()

    def get_all_one_dimensional_meshes(self) -> dict[str, Any]:
        return dict.fromkeys(self.enabled)

    def get_mesh(self, name: str | list[str]) -> Any:
        self.asked.append(name)
        return self

    def get_local_rank(self) -> int:
        return 0


def options(**changed: Any) -> Any:
    values = {
        "pipeline_parallel_schedule": "ZBVZeroBubble",
        "pipeline_parallel_schedule_csv": "",
        "pipeline_parallel_microbatch_size": 2,
        "pipeline_parallel_layers_per_stage": None,
        "pipeline_parallel_first_stage_less_layers": 1,
        "pipeline_parallel_last_stage_less_layers": 1,
        "module_fqns_per_model_part": None,
    }
    return SimpleNamespace(**values | changed)


def built(
    parallelism: Any, model: nn.Module | None = None, loss_fn: Any = None, dims: Any = None, training: Any = None
) -> Any:
    """As 0.3 calls it."""
    if model is None:
        with torch.device("meta"):
            model = Layers()
    return pipeline(
        model,
        parallel_dims=dims or OneRank(),
        parallelism=parallelism,
        training=training or SimpleNamespace(local_batch_size=8),
        model_config=None,
        parallelize_fn=lambda part, *, parallel_dims, parallelism, training: part,
        loss_fn=loss_fn,
    )


def test_the_number_of_microbatches_may_be_given() -> None:
    """As after 0.3, which has neither of the two sizes."""
    parallelism = options(num_pp_microbatches=4)
    del parallelism.pipeline_parallel_microbatch_size
    assert built(parallelism, training=SimpleNamespace())[0]._build.args[1].num_microbatches == 4


def names(part: nn.Module) -> list[str]:
    return sorted({name.rpartition(".")[0] for name, _ in part.named_parameters()})


def test_a_model_is_cut_as_the_options_say(tmp_path: Path) -> None:
    _, parts, first, last = built(options())
    assert first and last
    assert [names(part) for part in parts] == [
        ["layers.0", "layers.1", "layers.2", "tok_embeddings"],
        ["layers.3", "layers.4", "layers.5", "norm", "output"],
    ]
    _, parts, *_ = built(options(pipeline_parallel_schedule="Interleaved1F1B", pipeline_parallel_layers_per_stage=2))
    assert len(parts) == 4 and names(parts[0]) == ["layers.0", "tok_embeddings"]
    given = [["tok_embeddings"], [f"layers.{number}" for number in range(6)] + ["norm", "output"]]
    _, parts, *_ = built(options(module_fqns_per_model_part=given))
    assert names(parts[0]) == ["tok_embeddings"]
    path = tmp_path / "schedule.csv"
    fastpipe.make_schedule("interleaved_1f1b", num_ranks=1, num_microbatches=4, stages_per_rank=3).to_csv(path)
    _, parts, *_ = built(options(pipeline_parallel_schedule_csv=str(path)))
    assert len(parts) == 3
    with pytest.raises(ValueError, match="microbatch_size = 4 and .* = 8: .* has 4 microbatches"):
        built(options(pipeline_parallel_schedule_csv=str(path), pipeline_parallel_microbatch_size=4))


def test_layers_in_a_list_keep_their_numbers() -> None:
    class Listed(Layers):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(self.layers.values())  # type: ignore[assignment]

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            h = self.tok_embeddings(tokens) if self.tok_embeddings is not None else tokens
            for layer in self.layers:
                h = torch.tanh(layer(h))  # type: ignore[operator]
            return h if self.output is None else self.output(self.norm(h))

    model = Listed()
    _, parts, *_ = built(options(), model)
    assert [names(part) for part in parts] == [
        ["layers.0", "layers.1", "layers.2", "tok_embeddings"],
        ["layers.3", "layers.4", "layers.5", "norm", "output"],
    ]
    tokens = torch.randint(10, (2, 5))
    assert torch.equal(parts[1](parts[0](tokens)), model(tokens))


NAMES = ["tok_embeddings", *(f"layers.{number}" for number in range(6)), "norm", "output"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        (
            {"module_fqns_per_model_part": [NAMES[:4], ["norm", "out"]]},
            r"\['out', 'layers.3', .*'output'\] are missing",
        ),
        ({"module_fqns_per_model_part": [NAMES, ["norm"]]}, r"part: \['norm'\] are .* twice; give each of .* once"),
        ({"module_fqns_per_model_part": [NAMES]}, "give 1 stages: .*zbv"),
        (
            {"pipeline_parallel_schedule": "1F1B", "pipeline_parallel_layers_per_stage": 4},
            "pipeline_parallel_layers_per_stage or module_fqns_per_model_part give 2 stages: .*1f1b has no such option",
        ),
        ({"pipeline_parallel_microbatch_size": 3}, "microbatch_size = 3 and .* = 8: .* 2 microbatches"),
        ({"pipeline_parallel_layers_per_stage": 1, "pipeline_parallel_schedule": "zbv"}, "stages_per_rank"),
        ({"pipeline_parallel_schedule": "dualpipe"}, "num_ranks = 1"),
        ({"pipeline_parallel_schedule": "3F4B"}, "there is no such schedule"),
    ],
)
def test_options_that_do_not_fit_are_named(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        built(options(**changed))


@pytest.mark.parametrize(
    ("enabled", "within"),
    [
        (["fsdp", "batch"], []),
        (["batch", "cp", "fsdp", "tp"], ["cp", "tp"]),
        (["batch", "efsdp", "ep", "etp", "fsdp", "tp"], ["ep", "etp"]),
    ],
)
def test_the_pipeline_knows_where_stages_run_collectives(enabled: list[str], within: list[str]) -> None:
    dims = OneRank("pp", *enabled)
    built(options(), dims=dims)
    assert ["pp", *within] in dims.asked


def test_an_unknown_child_is_named() -> None:
    model = Layers()
    model.vision = nn.Linear(8, 8)
    with pytest.raises(ValueError, match=r"model.vision: no stage is known for it; set parallelism.module_fqns"):
        built(options(), model)


@pytest.mark.parametrize("how", ["a weight", "a layer", "a layer of a list"])
def test_what_two_stages_would_have_is_refused(how: str) -> None:
    model: Any = Layers()
    if how == "a weight":
        model.output.weight = model.tok_embeddings.weight
    elif how == "a layer":
        model.layers["3"] = model.layers["0"]
    else:
        model.layers = nn.ModuleList(model.layers.values())
        model.layers[3] = model.layers[0]
    with pytest.raises(ValueError, match="a weight is in several stages"):
        built(options(), model)


def test_an_argument_that_only_some_microbatches_have() -> None:
    given: dict[str, Any] = {}

    class Pipe:
        def step(self, *args: Any, **kwargs: Any) -> Any:
            given.update(kwargs)
            return SimpleNamespace(losses=None)

    schedule = PipelineSchedule(lambda loss_fn: Pipe(), lambda output, target: output)  # type: ignore[arg-type]
    schedule.step(kwarg_mbs=[{"places": 1}, {"places": 2, "image": 3}])
    assert given == {"target": None, "places": [1, 2], "image": [None, 3]}
    assert list(given) == ["target", "places", "image"], "in one order on every rank"


def test_a_step_takes_microbatches_and_arguments_of_the_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """As 0.3's Trainer calls it, against the unsplit model."""

    def loss_fn(output: torch.Tensor, target: torch.Tensor, scale: float) -> tuple[torch.Tensor, dict[str, Any]]:
        return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="sum") / scale, {}

    torch.manual_seed(0)
    whole = Layers()
    make = fastpipe.Pipeline
    monkeypatch.setattr(fastpipe, "Pipeline", lambda *args, mesh, **kwargs: make(*args, **kwargs))
    schedule, parts, *_ = built(options(), loss_fn=loss_fn)
    for part in parts:
        part.to_empty(device="cpu")
        part.load_state_dict(whole.state_dict(), strict=False)
    tokens, targets = torch.randint(10, (2, 8, 5))
    inputs = [(tokens[i : i + 2],) for i in range(0, 8, 2)]
    losses: list[torch.Tensor] = []
    target_mbs = list(targets.split(2))
    kwargs = {"target_mbs": target_mbs, "losses": losses, "loss_kwargs": {"scale": 40.0}, "kwarg_mbs": [{}] * 4}
    schedule.step(arg_mbs=inputs, **kwargs, return_outputs=False)
    expected = [loss_fn(whole(x), y, 40.0)[0] for (x,), y in zip(inputs, target_mbs, strict=True)]
    torch.stack(expected).sum().backward()
    assert torch.equal(torch.stack(losses), torch.stack(expected).detach())
    found = {name: p.grad for part in parts for name, p in part.named_parameters()}
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad, rtol=0, atol=1e-6)
    losses.clear()
    schedule.eval(arg_mbs=inputs, **kwargs)
    assert torch.equal(torch.stack(losses), torch.stack(expected).detach())
    entered: list[str] = []

    @contextlib.contextmanager
    def no_sync() -> Iterator[None]:
        entered.append("no_sync")
        yield

    monkeypatch.setattr(schedule.pipe, "no_sync", no_sync)
    for finalize in (True, False):
        schedule.step(arg_mbs=inputs, **kwargs, finalize_gradients=finalize)
    assert entered == ["no_sync"]
