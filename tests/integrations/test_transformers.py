"""fastpipe.integrations.transformers: the log is that of the Trainer without a pipeline, digit by digit."""

import ast
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

import fastpipe
from tests.runtime.examples import run

pytest.importorskip(
    "accelerate", reason="the Trainer needs accelerate, which is not installed: pip install '.[integrations]'"
)
transformers = pytest.importorskip("transformers")

KEPT = ("loss", "grad_norm", "learning_rate", "eval_loss", "epoch", "train_loss")


def logged(shown: str) -> list[dict[str, Any]]:
    """What the Trainer logged, without times."""
    return without_times(ast.literal_eval(line) for line in re.findall(r"^\{.*\}$", shown, flags=re.MULTILINE))


def without_times(lines: Iterable[dict[str, Any]], kept: Sequence[str] = KEPT) -> list[dict[str, Any]]:
    return [{name: line[name] for name in kept if name in line} for line in lines]


def assert_same_logs(mine: Any, plain: Any, **closeness: Any) -> list[dict[str, Any]]:
    """Two Trainers that have trained logged the same; returns it."""
    shown, expected = (without_times(made.state.log_history, (*KEPT, "total_flos")) for made in (mine, plain))
    assert len(shown) == len(expected)
    for line, wanted in zip(shown, expected, strict=True):
        assert line == pytest.approx(wanted, **closeness)
    return shown


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


def model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    return transformers.LlamaForCausalLM(config)


def trainer(tmp_path: Path, kind: Any = None, schedule: str = "1f1b", **changed: Any) -> Any:
    from fastpipe.integrations.transformers import PipelineTrainer

    given = {"model", "compute_loss_func", "model_init", "train_dataset", "eval_dataset", "optimizers", "data_collator"}
    given &= changed.keys()
    example = changed.pop("example", None)
    others = {"model": model()} | {name: changed.pop(name) for name in given}
    if "model_init" in others:
        others.pop("model")
    args = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, report_to="none", **changed)
    if kind is transformers.Trainer:
        return kind(args=args, **others)
    pipeline = {"schedule": schedule, "num_microbatches": 4, "num_ranks": 2}
    return (kind or PipelineTrainer)(args=args, pipeline=pipeline, example=example, **others)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor = 0.1: leave it out"),
        ({"bf16_full_eval": True}, "bf16_full_eval = True: leave it out"),
        ({"torch_compile": True}, "torch_compile = True: leave it out"),
        ({"eval_use_gather_object": True}, "eval_use_gather_object = True: leave it out"),
        ({"label_names": ["labels", "weights"]}, "label_names = .*weights.*: leave it out"),
        ({"optim": "lomo"}, "optim = .*lomo.*: leave it out"),
        ({"debug": "underflow_overflow"}, "debug = .*underflow.*: leave it out"),
        ({"torch_empty_cache_steps": 2}, "torch_empty_cache_steps = 2: leave it out"),
        ({"compute_loss_func": max}, "compute_loss_func = .*: leave it out"),
        ({"model_init": lambda: model()}, "model_init = .*: leave it out"),
    ],
)
def test_what_a_pipeline_cannot_follow_is_refused(changed: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="(?i)" + message):
        trainer(tmp_path, **changed)


def test_methods_of_another_trainer_that_would_not_be_called_are_refused(tmp_path: Path) -> None:
    from fastpipe.integrations.transformers import PipelineTrainer

    class Other(transformers.Trainer):
        def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().prediction_step(*args, **kwargs)

    class Mine(PipelineTrainer, Other):
        pass

    class Weighted(PipelineTrainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            return super().compute_loss(*args, **kwargs) * 2

    with pytest.raises(ValueError, match="prediction_step of another Trainer"):
        trainer(tmp_path, Mine)
    with pytest.raises(ValueError, match="compute_loss = .*Weighted.*: leave it out"):
        trainer(tmp_path, Weighted)


def test_an_optimizer_of_other_parameters_is_refused(tmp_path: Path) -> None:
    optimizers = (torch.optim.SGD(model().parameters()), None)
    with pytest.raises(ValueError, match="optimizers: take .* set trainer.optimizer"):
        trainer(tmp_path, optimizers=optimizers)
    made = trainer(tmp_path, train_dataset=rows(4, 0), max_steps=1)
    made.optimizer = optimizers[0]
    with pytest.raises(ValueError, match="optimizers: take .* set trainer.optimizer"):
        made.train()


def test_a_release_without_a_method_that_is_replaced_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(transformers.Trainer, "_load_optimizer_and_scheduler")
    with pytest.raises(ValueError, match=r"transformers 5\..* has no Trainer._load_optimizer_and_scheduler: use"):
        trainer(tmp_path)


def test_an_older_release_has_no_sampling_strategy(tmp_path: Path) -> None:
    made = trainer(tmp_path)
    del made.args.train_sampling_strategy
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.delattr(transformers.TrainingArguments, "train_sampling_strategy", raising=False)
        made._check()


def test_the_order_of_an_epoch_does_not_depend_on_those_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several processes draw it from a generator of their own, which no checkpoint has."""
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    made = trainer(tmp_path, train_dataset=rows(10, 0), train_sampling_strategy="group_by_length", data_seed=0)
    first, second = made.get_train_dataloader(), made.get_train_dataloader()
    orders = []
    for epoch in range(2):
        first.set_epoch(epoch)
        orders.append([batch["input_ids"].tolist() for batch in first])
    assert orders[0] != orders[1]
    second.set_epoch(1)
    assert [batch["input_ids"].tolist() for batch in second] == orders[1]


def test_every_process_reads_an_iterable_dataset_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By default Accelerate's first process reads it, and sends each process other rows."""
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    made = trainer(tmp_path, train_dataset=Stream(rows(8, 0)), max_steps=1)
    assert type(made.get_train_dataloader()).__name__ == "DataLoaderShard"


def test_processes_that_would_save_at_different_steps_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "world_size", 2)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    with pytest.raises(ValueError, match="enable_jit_checkpoint = True: leave it out"):
        trainer(tmp_path, enable_jit_checkpoint=True)


def test_a_model_whose_loss_is_not_found_is_refused(tmp_path: Path) -> None:
    config = transformers.BertConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2
    )
    model, example = transformers.BertForQuestionAnswering(config), {"input_ids": torch.ones(2, 6, dtype=torch.long)}
    with pytest.raises(AttributeError, match=r"no attribute 'loss_fn': split finds a loss only of models .* write"):
        trainer(tmp_path, model=model, example=example)


def test_several_gpus_of_one_process_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transformers.TrainingArguments, "n_gpu", 2)
    with pytest.raises(ValueError, match="n_gpu = 2: one process uses one GPU"):
        trainer(tmp_path)


def rows(count: int, seed: int) -> list[dict[str, torch.Tensor]]:
    ids = torch.randint(1, 16, (count, 6), generator=torch.Generator().manual_seed(seed))
    return [{"input_ids": row, "labels": row} for row in ids]


class Stream(torch.utils.data.IterableDataset[Any]):
    def __init__(self, data: list[Any]) -> None:
        self.data = data

    def __iter__(self) -> Any:
        return iter(self.data)


def packed(batch: list[Any]) -> dict[str, torch.Tensor]:
    """All texts in one row."""
    ids = torch.cat([row["input_ids"] for row in batch])[None]
    return {"input_ids": ids, "labels": ids}


SAVES = {"save_strategy": "steps", "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "loss"}
CHANGED: dict[str, dict[str, Any]] = {
    "bf16": {"bf16": True, "max_steps": 1},  # later ones differ by their rounding
    "batches of fewer rows than microbatches": {"max_steps": 3, "per_device_eval_batch_size": 5},
    "dataloader_drop_last": {"dataloader_drop_last": True},
    "an iterable dataset": {"train_dataset": Stream(rows(18, 0)), "eval_dataset": Stream(rows(6, 1))},
    "rows that a collator packs": {"data_collator": packed},
    "accumulation": {"gradient_accumulation_steps": 2, "average_tokens_across_devices": False},
    "max_grad_norm": {"max_grad_norm": 0.0},
    "neftune": {"neftune_noise_alpha": 5.0},
    "group_by_length": {"train_sampling_strategy": "group_by_length"},
    "activation_checkpointing": {"activation_checkpointing": True},
    "load_best_model_at_end": SAVES | {"learning_rate": 0.5, "schedule": "dualpipe", "train_dataset": rows(8, 0)},
}
"""What the Trainer does with its arguments, compared with the Trainer's own."""


@pytest.mark.parametrize("name", CHANGED)
def test_arguments_that_change_numbers(name: str, tmp_path: Path) -> None:
    """Ten rows are two batches of four, and one of two in four microbatches."""
    given = {"train_dataset": rows(10, 0), "eval_dataset": rows(6, 1), "eval_strategy": "steps", "eval_steps": 2}
    given |= {"max_steps": 4, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1}
    given |= {"optim": "sgd", "learning_rate": 0.1, "disable_tqdm": True, "save_strategy": "no"} | CHANGED[name]
    schedule = given.pop("schedule", "1f1b")
    mine, plain = (trainer(tmp_path / str(kind), kind, schedule, **given) for kind in (None, transformers.Trainer))
    dtypes: list[set[torch.dtype]] = [set(), set()]
    for made, seen in zip((mine, plain), dtypes, strict=True):
        made.model.model.layers[1].mlp.up_proj.register_forward_hook(lambda *args, seen=seen: seen.add(args[2].dtype))
        torch.manual_seed(0)
        made.train()
    assert dtypes[0] == dtypes[1] == {torch.bfloat16 if name == "bf16" else torch.float32}
    assert_same_logs(mine, plain, rel=1e-5, abs=1e-5 if name != "bf16" else 1e-3)
    for value, whole in zip(mine.pipe.state_dict().values(), plain.model.state_dict().values(), strict=True):
        torch.testing.assert_close(value, whole, rtol=1e-4, atol=1e-4)
    found, wanted = (made.evaluate()["eval_loss"] for made in (mine, plain))
    assert found == pytest.approx(wanted, rel=1e-4)


def other_model(name: str) -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "use_cache": False}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2, "pad_token_id": 0}
    if name == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=2))
    task = "multi_label_classification" if name == "several labels in a row" else None
    return transformers.LlamaForSequenceClassification(
        transformers.LlamaConfig(**sizes, num_labels=3, problem_type=task)
    )


@pytest.mark.parametrize("name", ["mixtral", "classifier", "several labels in a row"])
def test_models_that_are_split_by_an_example(name: str, tmp_path: Path) -> None:
    data = rows(10, 0)
    if name == "classifier":
        data = [row | {"labels": row["labels"][0] % 3} for row in data]
    elif name != "mixtral":
        data = [row | {"labels": (row["labels"][:3] % 2).float()} for row in data]
    given = {"train_dataset": data, "eval_dataset": data[:6], "max_steps": 3, "per_device_train_batch_size": 4}
    given |= {"logging_steps": 1, "disable_tqdm": True, "save_strategy": "no"}
    example = {"input_ids": torch.stack([row["input_ids"] for row in data[:2]])}
    mine, plain = (
        trainer(tmp_path / str(kind), kind, model=other_model(name), example=example, **given)
        for kind in (None, transformers.Trainer)
    )
    assert mine.train() and plain.train()
    assert len(assert_same_logs(mine, plain, rel=1e-5)) == 4
    assert mine.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-4)


def with_its_own_loss(name: str) -> tuple[Any, list[dict[str, torch.Tensor]]]:
    """A model that makes its loss of labels in its forward, and rows with different numbers of labels."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 2}
    if name == "llava":
        images = {"model_type": "clip_vision_model", "num_hidden_layers": 2, "image_size": 8, "patch_size": 4} | sizes
        text = {"model_type": "llama", "num_hidden_layers": 2, "vocab_size": 16} | sizes
        config = transformers.LlavaConfig(vision_config=images, text_config=text, image_token_id=15)
        made = transformers.LlavaForConditionalGeneration(config)
    elif name == "bart":
        halves = {"layers": 2, "attention_heads": 2, "ffn_dim": 8}
        parts = {f"{half}_{key}": value for half in ("encoder", "decoder") for key, value in halves.items()}
        config = transformers.BartConfig(vocab_size=16, d_model=8, dropout=0.0, forced_eos_token_id=None, **parts)
        made = transformers.BartForConditionalGeneration(config)
    else:
        parts = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2, "dropout_rate": 0.0}
        config = transformers.T5Config(vocab_size=16, decoder_start_token_id=0, **parts)
        made = transformers.T5ForConditionalGeneration(config)
    data = []
    for number, row in enumerate(rows(16, 0)):
        ids = row["input_ids"].clamp(3, 14)
        labels = torch.where(torch.arange(6) < 6 - number % 4, ids, -100)
        if name == "llava":
            ids, labels = (torch.cat([torch.full((4,), value), part]) for value, part in ((15, ids), (-100, labels)))
        data.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
        if name == "llava":
            data[-1]["pixel_values"] = torch.linspace(-1, number, 3 * 64).view(3, 8, 8)
        else:
            data[-1]["attention_mask"][6 - number % 3 :] = 0
    return made, data


@pytest.mark.parametrize("name", ["bart", "t5", "llava"])
def test_models_that_compute_their_own_loss(name: str, tmp_path: Path) -> None:
    data = with_its_own_loss(name)[1]
    example = {key: torch.stack([row[key] for row in data[2:4]]) for key in data[0]}
    given = {"train_dataset": data, "eval_dataset": data[:8], "max_steps": 3, "eval_strategy": "steps", "eval_steps": 1}
    given |= {"logging_steps": 1, "disable_tqdm": True, "save_strategy": "no", "max_grad_norm": 0.1}
    mine, plain = (
        trainer(tmp_path / str(kind), kind, model=with_its_own_loss(name)[0], example=example, **given)
        for kind in (None, transformers.Trainer)
    )
    assert mine.train() and plain.train()
    assert len(assert_same_logs(mine, plain, rel=1e-4)) == 7
    ignored = ["image_outputs", "cache"] if name == "llava" else None  # the Trainer cannot gather what is in these
    outputs, others = (made.predict(data[:8], ignore_keys=ignored).predictions for made in (mine, plain))
    torch.testing.assert_close(outputs, others, rtol=1e-3, atol=1e-4)


def test_activation_checkpointing_of_a_recorded_forward_is_refused(tmp_path: Path) -> None:
    made, data = with_its_own_loss("bart")
    example = {key: torch.stack([row[key] for row in data[2:4]]) for key in data[0]}
    with pytest.raises(ValueError, match="activation_checkpointing = True: leave it out, and pass .*recompute.*layers"):
        trainer(tmp_path, model=made, example=example, activation_checkpointing=True)


def test_an_adapter_of_peft_is_trained_and_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"])
    given = {"train_dataset": rows(8, 0), "eval_dataset": rows(4, 1), "max_steps": 4, "eval_strategy": "steps"}
    given |= {"eval_steps": 2, "per_device_train_batch_size": 4, "per_device_eval_batch_size": 4, "logging_steps": 1}
    given |= {"disable_tqdm": True, "save_steps": 2, "learning_rate": 0.1}
    made = []
    for kind in (None, transformers.Trainer):
        torch.manual_seed(0)
        made.append(trainer(tmp_path / str(kind), kind, model=peft.get_peft_model(model(), config), **given))
        made[-1].train()
    mine, plain = made
    shown = assert_same_logs(mine, plain, rel=1e-4)
    loaded = peft.PeftModel.from_pretrained(model(), tmp_path / "None/checkpoint-4").state_dict()
    for name, value in plain.model.state_dict().items():
        torch.testing.assert_close(loaded[name], value, rtol=1e-3, atol=1e-5)
    assert any("lora_B" in name and value.any() for name, value in loaded.items())
    torch.manual_seed(1)
    resumed = trainer(tmp_path / "resumed", model=peft.get_peft_model(model(), config), **given)
    resumed.train(resume_from_checkpoint=str(tmp_path / "None/checkpoint-2"))
    assert resumed.state.log_history[-2]["eval_loss"] == pytest.approx(shown[-2]["eval_loss"], rel=1e-5)


def test_an_adapter_that_is_no_part_of_layers_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed: pip install peft")
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match="whose adapter is no part of the model's layers"):
        trainer(tmp_path, model=peft.get_peft_model(model(), config))


def test_a_checkpoint_of_a_trainer_without_a_pipeline_is_named(tmp_path: Path) -> None:
    given = {"train_dataset": rows(8, 0), "max_steps": 1, "save_steps": 1, "disable_tqdm": True}
    trainer(tmp_path, transformers.Trainer, **given).train()
    with pytest.raises(ValueError, match="resume_from_checkpoint = .*checkpoint-1': it has no folder 'pipeline'"):
        trainer(tmp_path, **given | {"max_steps": 2}).train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))


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
