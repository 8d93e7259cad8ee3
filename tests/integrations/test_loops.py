"""The examples of Accelerate and Lightning: the same losses in one process and in two; what is refused."""

import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, IterableDataset, SubsetRandomSampler

import fastpipe
from tests.runtime.examples import run

needs_accelerate = pytest.mark.skipif(
    not find_spec("accelerate"), reason="accelerate is not installed: pip install '.[integrations]'"
)
needs_lightning = pytest.mark.skipif(
    not find_spec("lightning"), reason="lightning is not installed: pip install '.[integrations]'"
)


def losses(shown: str) -> dict[str, str]:
    return dict(re.findall(r"^(step \d|batch \d|validation):?(?: loss)? (\d\.\d+)$", shown, flags=re.MULTILINE))


@needs_accelerate
def test_accelerate_has_the_same_losses_in_one_process_and_in_two() -> None:
    alone, two = (losses(run("accelerate_loop.py", processes=count)) for count in (0, 2))
    assert len(alone) == 4 and alone == two
    script = Path(__file__).resolve().parents[2] / "examples/accelerate_loop.py"
    assert len(script.read_text().splitlines()) <= 40


BATCHES: dict[str, dict[str, Any]] = {
    "shuffle": {"shuffle": True, "batch_size": 20},
    "batch_sampler": {"batch_sampler": BatchSampler(SubsetRandomSampler(range(20)), 20, drop_last=False)},
}


@needs_accelerate
@pytest.mark.parametrize("kind", BATCHES)
def test_the_order_of_batches_does_not_depend_on_what_stages_draw(kind: str) -> None:
    """Dropout moves torch's generator, in each process differently."""
    from accelerate import Accelerator

    from fastpipe.integrations.accelerate import prepare_data_loader

    torch.manual_seed(0)
    loader = prepare_data_loader(DataLoader(list(range(20)), **BATCHES[kind]), Accelerator(cpu=True))
    orders = []
    for epoch in (0, 1, 0):
        torch.rand(epoch)
        loader.set_epoch(epoch)
        orders.append([row for batch in loader for row in batch.tolist()])
    assert orders[0] == orders[2] != orders[1]


@needs_accelerate
@pytest.mark.parametrize("kind", ["DistributedSampler", "BatchSamplerShard", "IterableDatasetShard"])
def test_a_loader_that_gives_processes_other_rows_is_refused(kind: str) -> None:
    from accelerate import Accelerator
    from accelerate.data_loader import BatchSamplerShard, IterableDatasetShard

    from fastpipe.integrations.accelerate import prepare_data_loader

    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(8))

    data, batches = list(range(8)), BatchSampler(range(8), 4, drop_last=False)
    loader: DataLoader[Any] = {
        "DistributedSampler": lambda: DataLoader(data, 4, sampler=DistributedSampler(data, 2, 0)),  # type: ignore[arg-type]
        "BatchSamplerShard": lambda: DataLoader(data, batch_sampler=BatchSamplerShard(batches, 2, 0)),  # type: ignore[arg-type]
        "IterableDatasetShard": lambda: DataLoader(IterableDatasetShard(Stream(), 4, num_processes=2), 4),
    }[kind]()
    with pytest.raises(ValueError, match=f"loader: its {kind} gives each of 2 processes other rows"):
        prepare_data_loader(loader, Accelerator(cpu=True))


@needs_accelerate
def test_a_model_that_accelerate_has_patched_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its forward is replaced on the instance, so a stage would run all of it."""
    transformers: Any = pytest.importorskip("transformers")
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState

    config = transformers.LlamaConfig(
        vocab_size=16, hidden_size=8, intermediate_size=8, num_hidden_layers=2, num_attention_heads=2, use_cache=False
    )
    model = transformers.LlamaForCausalLM(config)
    AcceleratorState._reset_state(True)  # of the tests before
    try:
        patched = Accelerator(cpu=True, mixed_precision="bf16").prepare(model)
    finally:
        for state in (AcceleratorState, GradientState, PartialState):
            state._reset_state()  # of the process
    with pytest.raises(ValueError, match="forward"):
        fastpipe.split(patched)


@needs_lightning
def test_lightning_has_the_same_losses_in_one_process_and_in_two_and_goes_on(tmp_path: Path) -> None:
    """A checkpoint of one process goes on in two."""
    one, two, three = (str(tmp_path / name) for name in ("one", "two", "three"))
    alone = losses(run("lightning_loop.py", one))
    assert len(alone) == 6 + 1 and losses(run("lightning_loop.py", two, processes=2)) == alone
    (saved,), (of_two,) = (list(Path(folder, "checkpoints").iterdir()) for folder in (one, two))
    assert all(fastpipe.latest_checkpoint(path.parent) == path for path in (saved, of_two))
    resumed = run("lightning_loop.py", three, "--resume", str(saved), "--epochs", "3", processes=2)
    longer = losses(run("lightning_loop.py", str(tmp_path / "four"), "--epochs", "3"))
    assert {name: longer[name] for name in losses(resumed)} == losses(resumed)
    assert {"step 7", "step 9", "validation"} <= losses(resumed).keys()


@needs_lightning
def test_lightning_s_strategy_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # as it does when it is imported
    from fastpipe.integrations.lightning import PipelineStrategy

    strategy = PipelineStrategy()
    with pytest.raises(ValueError, match="use_distributed_sampler = True"):
        _ = strategy.distributed_sampler_kwargs
    strategy._lightning_module = torch.nn.Module()  # type: ignore[assignment]
    with pytest.raises(AttributeError, match="set self.pipe in configure_model"):
        _ = strategy.pipe


@pytest.fixture
def one_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Lightning's Trainer with a strategy that makes no process group."""
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    for name in ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK"):  # Lightning sets them
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    import lightning

    from fastpipe.integrations.lightning import PipelineStrategy

    class Alone(PipelineStrategy):
        def setup_environment(self) -> None: ...

    options = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "use_distributed_sampler": False,
    }
    return lambda **changed: lightning.Trainer(strategy=Alone(), **options, **changed)


@needs_lightning
def test_a_checkpoint_of_lightning_has_what_is_not_in_the_pipeline(one_process: Any, tmp_path: Path) -> None:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False
            self.layers = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
            self.register_buffer("count", torch.zeros(1))

        def configure_model(self) -> None:
            self.pipe = fastpipe.Pipeline(self.layers, "1f1b", 1, torch.nn.functional.mse_loss, num_ranks=2)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.pipe.parameters())

        def training_step(self, batch: Any) -> None:
            self.pipe.step(batch, target=batch)
            self.optimizers().step()
            self.count += 1

    whole, weights = (str(tmp_path / name) for name in ("whole", "weights"))
    trainer, first = one_process(max_steps=2, barebones=True), Module()
    trainer.fit(first, DataLoader(torch.ones(2, 2)))
    trainer.save_checkpoint(whole)
    trainer.save_checkpoint(weights, weights_only=True)
    second = Module()
    one_process(max_steps=3, barebones=True).fit(second, DataLoader(torch.ones(3, 2)), ckpt_path=whole)
    assert second.count == 3
    with pytest.raises(KeyError, match="no state of an optimizer"):
        one_process(barebones=True).fit(Module(), DataLoader(torch.ones(1, 2)), ckpt_path=weights)


@needs_lightning
def test_a_sum_of_logged_values_is_not_one_over_processes(one_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning.pytorch.strategies.ddp._sync_ddp_if_available", lambda value, *_, **__: value * 2)
    assert one_process().strategy.reduce(torch.ones(()), reduce_op="sum") == 1


@needs_lightning
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"automatic": True}, "automatic_optimization = True"),
        ({"precision": "16-mixed"}, "precision = '16-mixed': use fastpipe.GradScaler"),
        ({"sync_batchnorm": True}, "sync_batchnorm = True"),
        ({"gradient_clip_val": 1.0}, "gradient_clip_val=1.0"),  # by Lightning
        ({"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    ],
)
def test_what_lightning_would_not_follow_is_refused(changed: dict[str, Any], message: str, one_process: Any) -> None:
    """Before a process group is made; what a Trainer on CPUs does not take is set in its place."""
    import lightning
    from lightning.pytorch.plugins.precision import MixedPrecision

    class Module(lightning.LightningModule):
        def training_step(self, batch: Any) -> None: ...

        def configure_optimizers(self) -> None: ...

    module = Module()
    module.automatic_optimization = changed.pop("automatic", False)
    if changed.pop("precision", None):
        changed["plugins"] = MixedPrecision("16-mixed", "cpu")
    with pytest.raises(Exception, match=message):
        one_process(**changed).fit(module, [0])
