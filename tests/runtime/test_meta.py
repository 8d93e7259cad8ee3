"""Stages on the meta device: cut without memory, then initialised or loaded; what is refused before that."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fastpipe
from fastpipe import Pipeline
from tests.runtime.checks import same_bits
from tests.runtime.meta_models import (
    COUNT,
    WIDTH,
    Rotated,
    assert_trains_like,
    batch,
    initialise,
    initialise_stages,
    layers,
    loss_fn,
    num_bytes,
    on_meta,
    reference,
    step,
    whole_model,
)

SCHEDULES = ["1f1b", "zbv", "dualpipev", "dualpipe", "interleaved_1f1b"]


def build(stages: Any = None, schedule: str = "1f1b", **options: Any) -> Pipeline:
    return Pipeline(on_meta() if stages is None else stages, schedule, COUNT, loss_fn, num_ranks=2, **options)


def sgd(pipe: Pipeline) -> torch.optim.Optimizer:
    return torch.optim.SGD(pipe.parameters(), lr=0.1)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_initialised_stages_train_like_the_unsplit_model(schedule: str, executor: str) -> None:
    pipe = build(None, schedule, executor=executor, partition="parameters")
    assert num_bytes(pipe.stage_modules.values()) == 0 and "meta " in pipe.describe()
    before, optimizer = list(pipe.parameters()), sgd(pipe)
    with pytest.raises(ValueError, match="device = 'cuda'"):
        pipe.to_empty(device="cuda")
    assert pipe.to_empty(device="cpu:0") is pipe
    initialise_stages(pipe)
    assert all(map(lambda a, b: a is b, before, pipe.parameters())), "an optimizer may exist already"
    assert_trains_like(pipe, whole_model(), optimizer)
    assert "meta " not in pipe.describe()


@pytest.mark.parametrize("schedule", ["1f1b", "dualpipev", "dualpipe"])
@pytest.mark.parametrize("how", ["load_checkpoint", "assign", "to_empty"])
def test_loaded_stages_train_like_the_unsplit_model(schedule: str, how: str, tmp_path: Path) -> None:
    whole = whole_model()
    pipe = build(None, schedule)
    if how == "load_checkpoint":
        fastpipe.save_checkpoint(tmp_path / "saved", build(whole_model()))
        fastpipe.load_checkpoint(tmp_path / "saved", pipe)
    elif how == "assign":
        pipe.load_state_dict({name: value.clone() for name, value in whole.state_dict().items()}, assign=True)
        pipe.to_empty()  # the buffers that are in no state
    else:
        pipe.to_empty().load_state_dict(whole.state_dict())
    with pytest.raises(ValueError, match=r"1\.angles, 2\.angles.* of stage 0 .*no checkpoint has them.*reset_param"):
        step(pipe, batch())
    for layer in (layer for stage in pipe.stage_modules.values() for layer in stage.children()):
        if isinstance(layer, Rotated):
            layer.compute_angles()
    assert [name for name, _ in pipe.named_parameters()] == [name for name, _ in whole.named_parameters()]
    assert_trains_like(pipe, whole, sgd(pipe))


def test_a_layer_in_several_stages(executor: str) -> None:
    def twice() -> list[nn.Module]:
        made = layers(tied=False)
        return [*made[:6], made[3], *made[6:]]

    pipe = build(on_meta(twice), "zbv", executor=executor)
    pipe.to_empty()
    initialise_stages(pipe)
    made = twice()
    initialise((str(number), layer) for number, layer in enumerate(made))
    whole = nn.Sequential(*made)
    assert_trains_like(pipe, whole, sgd(pipe))


def test_what_has_memory_keeps_its_values() -> None:
    made = on_meta(lambda: layers(tied=False))
    made[4] = Rotated()
    kept = made[4].linear.weight.detach().clone()
    pipe = build(made).to_empty()
    initialise((str(number), layer) for number, layer in enumerate(made) if number != 4)
    values = {name: value.clone() for name, value in pipe.state_dict().items()}
    pipe.to_empty()
    step(pipe, batch())
    pipe.to_empty()
    assert all(same_bits(value, values[name]) for name, value in pipe.state_dict().items())
    assert same_bits(made[4].linear.weight, kept)


def test_gradients_in_another_dtype(executor: str) -> None:
    whole = whole_model().to(torch.bfloat16)
    for assign in (False, True):
        pipe = build(on_meta(lambda: [layer.to(torch.bfloat16) for layer in layers()]), grad_dtype=torch.float32)
        if assign:
            pipe.load_state_dict(whole.state_dict(), assign=True)
        initialise_stages(pipe.to_empty())
        if not assign:
            pipe.load_state_dict(whole.state_dict())
        step(pipe, batch())
        assert {p.grad.dtype for p in pipe.parameters() if p.grad is not None} == {torch.float32}


def test_costs_need_no_memory() -> None:
    made = on_meta()
    x = batch()[:2]
    assert fastpipe.layer_costs(made, by="parameters") == fastpipe.layer_costs(layers(), by="parameters")
    assert fastpipe.layer_costs(made, x, by="flops") == fastpipe.layer_costs(layers(), x, by="flops")
    for by in ("seconds", "memory"):
        with pytest.raises(ValueError, match=f"partition = '{by}': layers are on the meta device.*'parameters'"):
            build(made, partition=by, example=x)


def test_a_device_that_computes_is_needed() -> None:
    assert build().device == torch.device("cpu")
    with pytest.raises(ValueError, match=r"device is meta, which computes nothing: pass .*device='cpu'"):
        build(device="meta")
    with torch.device("meta"), pytest.raises(ValueError, match=r"device is meta, which computes nothing"):
        build()
    with pytest.raises(ValueError, match="device = 'meta': the pipeline computes on cpu|device is meta"):
        build().to_empty(device="meta")


@pytest.mark.parametrize(
    "call",
    [
        lambda pipe, folder: step(pipe, batch()),
        lambda pipe, folder: pipe.eval_step(batch()),
        lambda pipe, folder: pipe.profile(batch(), target=batch()),
        lambda pipe, folder: fastpipe.save_checkpoint(folder / "saved", pipe),
    ],
    ids=["step", "eval_step", "profile", "save_checkpoint"],
)
def test_values_are_needed_first(call: Callable[[Pipeline, Path], Any], tmp_path: Path) -> None:
    pipe = build()
    with pytest.raises(ValueError, match=r"0\.weight, 1\.linear.* of stage 0 are on the meta device: .*to_empty.*load"):
        call(pipe, tmp_path)
    pipe.to_empty()
    with pytest.raises(ValueError, match=r"0\.weight, .* have no values since to_empty: initialise them"):
        call(pipe, tmp_path)
    assert not (tmp_path / "saved").exists()
    initialise_stages(pipe)
    call(pipe, tmp_path)


def test_one_parameter_without_values_is_named() -> None:
    pipe = build().to_empty()
    initialise_stages(pipe)
    bias = dict(pipe.named_parameters())["6.linear.bias"]
    with torch.no_grad():
        bias.fill_(float("nan"))
    assert torch.isnan(step(pipe, batch()).loss), "values that a user wrote are the user's"  # type: ignore[arg-type]
    pipe = build().to_empty()
    keep = pipe.stage_modules[1].get_submodule("6.linear").reset_parameters
    pipe.stage_modules[1].get_submodule("6.linear").reset_parameters = lambda: None  # type: ignore[assignment]
    initialise_stages(pipe)
    with pytest.raises(ValueError, match=r"stages: 6\.linear\.weight, 6\.linear\.bias of stage 1 have no values"):
        step(pipe, batch())
    keep()
    step(pipe, batch())


def test_data_initialised_by_data_counts() -> None:
    """Older code initialises ``weight.data``, which has no version in common with the weight."""
    pipe = build().to_empty()
    for module in pipe.stage_modules.values():
        for tensor in (*module.parameters(), *module.buffers()):
            tensor.data.fill_(1)
    step(pipe, batch())


def test_nothing_is_copied_into_meta() -> None:
    with pytest.raises(ValueError, match=r"stage 0 is on the meta device.*to_empty.*assign=True"):
        build().load_state_dict(whole_model().state_dict())
    with pytest.raises(ValueError, match=r"the state has 0\.weight on meta.*move it to cpu"):
        build().load_state_dict(build().state_dict(), assign=True)


def test_assigned_weights_stay_tied() -> None:
    pipe = build()
    state = {name: value.clone() for name, value in whole_model().state_dict().items()}
    pipe.load_state_dict(state, assign=True)
    first, last = pipe.stage_modules[0].get_parameter("0.weight"), pipe.stage_modules[1].get_parameter("9.weight")
    assert first is last and first.data_ptr() == state["0.weight"].data_ptr()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_by_torchs_own_means(num_ranks: int) -> None:
    """``module.to_empty`` works where no weight is tied, and is refused where it unties one."""
    for tied in (False, True):
        made = on_meta(lambda tied=tied: layers(tied=tied))
        pipe = Pipeline(made, "1f1b", COUNT, loss_fn, num_ranks=num_ranks)
        for stage in pipe.stage_modules.values():
            stage.to_empty(device="cpu")
        initialise_stages(pipe)
        if tied:
            with pytest.raises(ValueError, match=r"tied: 0\.weight and 9\.weight .* call pipe\.to_empty\(\)"):
                step(pipe, batch())
        else:
            assert_trains_like(pipe, whole_model(tied=False), sgd(pipe))


def test_hooks_are_registered_later() -> None:
    made = on_meta(lambda: layers(tied=False))
    made[2].linear.weight.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(ValueError, match=r"2\.linear\.weight has a hook.*register it after to_empty"):
        build(made).to_empty()


def test_stages_from_a_function_and_from_a_dict() -> None:
    def make(index: int) -> nn.Module:
        with torch.device("meta"):
            return nn.Sequential(*layers(tied=False)[5 * index : 5 * index + 5])

    for stages in (make, {0: make(0), 1: make(1)}):
        pipe = build(stages)
        pipe.to_empty()
        for stage, module in pipe.stage_modules.items():
            for name, layer in module.named_children():
                initialise([(str(5 * stage + int(name)), layer)])
        result, expected = step(pipe, batch()), reference(pipe, whole_model(tied=False), batch())
        assert result.loss is not None and same_bits(result.loss, expected.loss)


def test_replanned_before_and_after() -> None:
    pipe = build(None, "zbv")
    first, second = (
        fastpipe.make_schedule(name, num_ranks=2, num_microbatches=COUNT) for name in ("dualpipev", "interleaved_1f1b")
    )
    pipe.replan(first)
    pipe.to_empty()
    with pytest.raises(ValueError, match="have no values"):
        pipe.replan(second)
    initialise_stages(pipe)
    pipe.replan(second)
    result, expected = step(pipe, batch()), reference(pipe, whole_model(), batch())
    assert result.loss is not None and same_bits(result.loss, expected.loss)


def test_an_example_cannot_run_on_meta() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    with torch.device("meta"):
        model = Model()
    with pytest.raises(ValueError, match="model is a Model on the meta device, and the example is run on it"):
        fastpipe.split(model, torch.zeros(2, WIDTH))


def test_the_log_says_that_stages_are_on_meta(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fastpipe"):
        build()
    assert "stages are built on the meta device" in caplog.text
