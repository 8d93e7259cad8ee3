"""The parts of examples/train_gpt.py, one by one."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from tests.patience import PATIENCE

torch = pytest.importorskip("torch")
EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch):
    """Import a module of the example, as the script does."""
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module


@pytest.fixture
def text_data(example) -> ModuleType:
    return example("text_data")


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A library of forty files, of which those that are no text of it must not be read."""
    for number in range(40):
        (tmp_path / f"module_{number:02d}.py").write_text(f"value = {number:02d}\n")
    for folder in ("site-packages", "test", "email/tests"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "other.py").write_text("not of the library")
    return tmp_path


def text_of(tensor) -> str:
    return bytes(tensor.tolist()).decode()


def test_every_twentieth_file_validates_and_the_rest_trains(text_data, library):
    corpus = text_data.read_corpus(library)
    assert text_of(corpus.validation) == "value = 00\nvalue = 20\n"
    assert text_of(corpus.training) == "".join(f"value = {n:02d}\n" for n in range(40) if n % 20)


def test_a_library_with_hardly_any_file_is_refused(text_data, tmp_path):
    with pytest.raises(ValueError, match="holds 0 Python files"):
        text_data.read_corpus(tmp_path)


def test_the_library_of_this_interpreter_is_megabytes_of_text(text_data):
    corpus = text_data.read_corpus()
    assert len(corpus.training) > 3_000_000
    assert len(corpus.validation) > 100_000


def test_targets_are_the_bytes_that_follow(text_data):
    inputs, targets = text_data.windows(torch.arange(100, dtype=torch.uint8), torch.tensor([0, 7]), 5)
    assert inputs.tolist() == [[0, 1, 2, 3, 4], [7, 8, 9, 10, 11]]
    assert targets.tolist() == [[1, 2, 3, 4, 5], [8, 9, 10, 11, 12]]


def test_the_same_seed_gives_every_rank_the_same_batches(text_data):
    text = torch.randint(256, (1000,), dtype=torch.uint8)
    one, other, third = (text_data.random_batches(text, 4, 16, seed) for seed in (1, 1, 2))
    for _ in range(3):
        inputs, targets = next(one)
        same, same_targets = next(other)
        assert inputs.shape == targets.shape == (4, 16)
        assert torch.equal(inputs, same) and torch.equal(targets, same_targets)
        assert not torch.equal(inputs, next(third)[0])


def test_random_windows_reach_the_whole_text_and_never_past_it(text_data):
    batches = text_data.random_batches(torch.arange(8, dtype=torch.uint8), 64, 5, seed=0)
    assert set(next(batches)[0][:, 0].tolist()) == {0, 1, 2}


def test_validation_windows_are_spread_from_the_first_byte_to_the_last(text_data):
    batches = text_data.even_batches(torch.arange(200, dtype=torch.uint8), count=2, rows=3, length=10)
    assert [inputs.shape for inputs, _ in batches] == [(3, 10), (3, 10)]
    assert batches[0][0][0, 0] == 0
    assert batches[-1][1][-1, -1] == 199


def test_the_bigram_model_is_the_table_of_pairs(text_data):
    text = torch.tensor(list(b"abababac" * 500), dtype=torch.uint8)
    bigram = text_data.Bigram(text)
    assert torch.allclose((-bigram.nats).exp().sum(1), torch.ones(256, dtype=torch.float64))
    assert bigram.nats[ord("a"), ord("b")] == pytest.approx(-math.log(3 / 4), abs=1e-3)
    assert bigram.nats[ord("b"), ord("a")] == pytest.approx(0, abs=1e-2)
    unseen = (torch.tensor([[ord("z")]]), torch.tensor([[ord("q")]]))
    assert math.isfinite(bigram.loss([unseen]))


def test_the_bigram_model_beats_frequencies_on_real_text(text_data):
    corpus = text_data.read_corpus()
    batches = text_data.even_batches(corpus.validation, 2, 32, 64)
    frequencies = -text_data.byte_frequencies(corpus.training).log()
    alone = sum(float(frequencies[targets].mean()) for _, targets in batches) / 2
    assert 1.5 < text_data.Bigram(corpus.training).loss(batches) < alone - 0.5


def small_model(example, **shape):
    gpt_model = example("gpt_model")
    frequencies = torch.full((256,), 1 / 256, dtype=torch.float64)
    return torch.nn.Sequential(*gpt_model.gpt_layers(gpt_model.Shape(**shape), frequencies))


@pytest.mark.parametrize("layers", [1, 2, 5])
def test_the_model_has_as_many_layers_as_asked_for_and_gives_logits(example, layers):
    model = small_model(example, layers=layers, width=32, context=16)
    assert len(model) == layers
    assert model(torch.randint(256, (3, 16))).shape == (3, 16, 256)


def test_the_model_cannot_look_ahead(example):
    torch.manual_seed(0)
    model = small_model(example, layers=2, width=32, context=16)
    text = torch.randint(256, (1, 16))
    changed = text.clone()
    changed[0, 9] = (text[0, 9] + 1) % 256
    before, after = model(text), model(changed)
    assert torch.equal(before[:, :9], after[:, :9])
    assert (before[:, 9:] != after[:, 9:]).any(dim=-1).all()


def test_attention_sees_how_far_bytes_are_apart_and_not_where_they_stand(example):
    torch.manual_seed(0)
    gpt_model = example("gpt_model")
    attention = gpt_model.Attention(gpt_model.Shape(width=64, context=32))
    query, key = torch.randn(2, 1, 2, 1, 32)

    def score(first: int, second: int):
        turned = attention.rotate(query.repeat(1, 1, 32, 1))[..., first, :]
        return (turned * attention.rotate(key.repeat(1, 1, 32, 1))[..., second, :]).sum(-1)

    assert torch.allclose(score(3, 9), score(20, 26), atol=1e-4)
    assert not torch.allclose(score(3, 9), score(3, 10), atol=1e-2)


@pytest.mark.parametrize(("shape", "what"), [({"width": 33}, "width = 33"), ({"layers": 0}, "layers = 0")])
def test_a_shape_that_cannot_be_is_refused(example, shape, what):
    with pytest.raises(ValueError, match=what):
        example("gpt_model").Shape(**shape)


def test_the_untrained_model_guesses_by_frequency(example, text_data):
    gpt_model = example("gpt_model")
    corpus = text_data.read_corpus()
    frequencies = text_data.byte_frequencies(corpus.training)
    model = torch.nn.Sequential(*gpt_model.gpt_layers(gpt_model.Shape(layers=1, width=32), frequencies))
    inputs, targets = text_data.even_batches(corpus.validation, 1, 32, 64)[0]
    by_frequency = float(-frequencies.log()[targets].mean())
    assert gpt_model.loss_fn(model(inputs), targets).item() == pytest.approx(by_frequency, abs=0.1)


def test_a_continuation_begins_with_the_prompt_and_follows_the_seed(example):
    write = example("gpt_model").continue_text
    model = small_model(example, layers=1, width=32, context=8)
    first = write(model, "def", 12, context=8, seed=3)
    assert first.startswith("def") and first == write(model, "def", 12, context=8, seed=3)
    assert first != write(model, "def", 12, context=8, seed=4)


def test_steps_are_counted_and_seconds_are_measured(example, monkeypatch):
    training = example("training")
    steps = training.Budget(4, seconds=1e-9)
    assert [steps.spent(step) for step in (0, 1, 4, 5)] == [0, 0.25, 1, 1]
    now = [100.0]
    monkeypatch.setattr(training.time, "monotonic", lambda: now[0])
    seconds = training.Budget(None, seconds=10)
    now[0] = 105.0
    assert seconds.spent(7) == pytest.approx(0.5)
    now[0] = 125.0
    assert seconds.spent(8) == 1


@pytest.mark.parametrize(("wanted", "count"), [("auto", 0), ("cpu", 0), ("cpu", 2)])
def test_a_process_without_a_gpu_has_the_cpu(example, monkeypatch, wanted, count):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    assert example("training").own_device(wanted) == torch.device("cpu")


def test_processes_have_gpus_in_turn_and_a_wish_for_one_that_is_not_there_is_refused(example, monkeypatch):
    own_device = example("training").own_device
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for process in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(process))
        assert own_device("auto") == own_device("cuda") == torch.device("cuda", process % 2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ValueError, match="device = 'cuda': torch finds no GPU"):
        own_device("cuda")


def test_the_learning_rate_rises_then_falls(example):
    rates = [example("training").learning_rate(1.0, spent / 100) for spent in range(101)]
    assert rates[0] == pytest.approx(0.05) and rates[5] == 1.0 and rates[100] == pytest.approx(0.05)
    assert rates[:6] == sorted(rates[:6]) and rates[5:] == sorted(rates[5:], reverse=True)


def test_the_meter_smooths_the_loss_and_keeps_the_last_bubble(example):
    meter = example("training").Meter()
    timeline = SimpleNamespace(bubble_fraction=0.25)
    meter.update(SimpleNamespace(loss=torch.tensor(4.0), timeline=timeline), 100, traced=True)
    meter.update(SimpleNamespace(loss=torch.tensor(2.0)), 100, traced=False)
    assert meter.loss == pytest.approx(3.9) and meter.tokens == 200
    line = meter.line(2, 0.5)
    assert line.startswith(" 50%   step     2   loss 3.900") and line.endswith("measured bubble 25%")


def test_only_one_rank_speaks_writes_and_draws(example, monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("RANK", "1")
    console = example("console").Console()
    console.fact("name", "text")
    console.quote(lambda: pytest.fail("written where it is not printed"))
    console.picture(None, tmp_path / "folder" / "picture.png")
    console.progress("line")
    console.end_progress("line")
    assert capsys.readouterr().out == "" and not list(tmp_path.iterdir())


def test_facts_are_aligned_and_wrapped(example, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    console = example("console").Console()
    console.fact("model", "word " * 20)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  model       word") and len(lines) > 1
    assert all(line.startswith(" " * 14 + "word") and len(line) <= 60 for line in lines[1:])


def test_progress_is_rare_in_a_file_and_overwritten_on_a_terminal(example, monkeypatch, capsys):
    monkeypatch.delenv("RANK", raising=False)
    console = example("console").Console()
    for number in range(5):
        console.progress(f"line {number}")
    console.end_progress("line 5")
    assert capsys.readouterr().out.split() == ["line", "0", "line", "5"]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    console = example("console").Console()
    console.progress("first")
    console.end_progress("second")
    assert capsys.readouterr().out.count("\r\033[K") == 2


def test_a_missing_drawing_library_is_told_and_does_not_end_the_run(example, monkeypatch, capsys, tmp_path):
    def plot(path: Path) -> Path:
        raise ImportError("pip install matplotlib")

    monkeypatch.delenv("RANK", raising=False)
    example("console").Console().picture(SimpleNamespace(plot=plot), tmp_path / "picture.png")
    assert "picture     none: pip install matplotlib" in capsys.readouterr().out


def test_help_explains_itself():
    command = [sys.executable, str(EXAMPLES / "train_gpt.py"), "--help"]
    shown = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE, check=True).stdout
    assert "--schedule" in shown and "dualpipev" in shown and "(default: 8)" in shown
