"""fastpipe.integrations.transformers: the log is that of the Trainer without a pipeline, digit by digit."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpipe
from tests.runtime.examples import run

pytest.importorskip("accelerate", reason="the Trainer needs accelerate, which is not installed: pip install '.[dev]'")
transformers = pytest.importorskip("transformers")

KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "train_loss")


def logged(shown: str) -> list[dict[str, str]]:
    """What the Trainer logged, without times."""
    lines = [ast.literal_eval(line) for line in re.findall(r"^\{.*\}$", shown, flags=re.MULTILINE)]
    return [{name: line[name] for name in KEPT if name in line} for line in lines]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    folder = tmp_path_factory.mktemp("plain")
    found = logged(run("hugging_face_trainer.py", "--folder", str(folder), "--plain"))
    assert len(found) == 6 + 2 + 1 and {name for line in found for name in line} == set(KEPT)
    return found


def test_ranks_that_are_threads(plain: Any, tmp_path: Path) -> None:
    assert logged(run("hugging_face_trainer.py", "--folder", str(tmp_path), "--schedule", "dualpipev")) == plain


def test_processes_and_going_on_in_one(plain: Any, tmp_path: Path) -> None:
    """Two processes; their checkpoint goes on in one, and is one that transformers reads."""
    two, one = (str(tmp_path / name) for name in ("two", "one"))
    assert logged(run("hugging_face_trainer.py", "--folder", two, processes=2)) == plain
    resumed = logged(run("hugging_face_trainer.py", "--folder", one, "--resume", f"{two}/checkpoint-3"))
    assert resumed[:-1] == plain[4:-1]  # train_loss is that of these steps
    a, b = (
        transformers.AutoModelForCausalLM.from_pretrained(f"{folder}/checkpoint-6").state_dict()
        for folder in (two, one)
    )
    assert a.keys() == b.keys()
    assert all(abs(a[name] - b[name]).max() < 1e-5 for name in a)


def trainer(tmp_path: Path, **changed: Any) -> Any:
    from fastpipe.integrations.transformers import PipelineTrainer

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config)
    others = {"compute_loss_func": changed.pop("compute_loss_func", None)}
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changed)
    pipeline = {"schedule": "1f1b", "num_microbatches": 2, "num_ranks": 2}
    return PipelineTrainer(model, args, pipeline=pipeline, **others)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor = 0.1: leave it out"),
        ({"torch_compile": True}, "torch_compile = True: leave it out"),
        ({"compute_loss_func": max}, "compute_loss_func, compute_loss: a pipeline takes the model's own loss"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        trainer(tmp_path, **changed)


def test_the_optimizer_has_the_parameters_of_this_process(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    groups = made.create_optimizer().param_groups
    assert isinstance(made.pipe, fastpipe.Pipeline)
    assert {id(p) for group in groups for p in group["params"]} == {id(p) for p in made.pipe.parameters()}
    assert [group["weight_decay"] for group in groups] == [made.args.weight_decay, 0.0]
    norms = [p for name, p in made.pipe.named_parameters() if "norm" in name]
    assert {id(p) for p in groups[1]["params"]} == {id(p) for p in norms}


def test_predictions_are_the_model_s(tmp_path: Path) -> None:
    made = trainer(tmp_path, per_device_eval_batch_size=4)
    ids = torch.randint(16, (6, 5), generator=torch.Generator().manual_seed(0))
    found = made.predict([{"input_ids": row, "labels": row} for row in ids])  # a batch of four rows, and one of two
    with torch.no_grad():
        expected = made.model(input_ids=ids, labels=ids)
    torch.testing.assert_close(torch.as_tensor(found.predictions), expected.logits)
    assert torch.equal(torch.as_tensor(found.label_ids), ids)
    assert found.metrics["test_loss"] == pytest.approx(float(expected.loss), rel=1e-5)
