"""Callbacks of training loops, and scalars: against the real Lightning and transformers.

Keras is in `tests/portable`, where TensorFlow is loaded.
"""

# mypy: allow-untyped-calls
# mypy: disable-error-code="misc"
# The libraries' classes have no types.

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import amanda
from amanda_core.errors import ConfigError, MissingExtraError
from amanda_tools.flops import Flops
from amanda_tools.kit.output.scalars import ScalarLog, scalars_of
from amanda_tools.latency.result import LatencyResult
from amanda_tools.latency.times import StepTime
from amanda_tools.sparsity import Sparsity

# What the libraries warn of, of one another and of PyTorch, is not the subject.
pytestmark = pytest.mark.filterwarnings("ignore")

FORWARD = 4 * 3 * 2
"""MACs of a batch of four through a linear layer of 3 by 2."""


class Data(torch.utils.data.Dataset[Any]):
    def __init__(self, fails_at: int | None = None) -> None:
        self.fails_at = fails_at

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        return {"x": torch.ones(3), "labels": torch.tensor(0)}


class Model(nn.Module):
    """Fails in the second step if it is told to."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.linear, self.fails, self.calls = nn.Linear(3, 2), fails, 0

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Any:
        self.calls += 1
        if self.fails and self.calls == 2:
            raise RuntimeError("planted")
        logits = self.linear(x)
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def train_transformers(folder: Path, callback: Any, model: Model) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    arguments = transformers.TrainingArguments(
        str(folder), num_train_epochs=2, per_device_train_batch_size=4, report_to=[],
        save_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=Data(), callbacks=[callback]).train()


def train_lightning(folder: Path, callback: Any, model: Model) -> None:
    lightning = pytest.importorskip("lightning.pytorch", reason="lightning is not installed")
    base: Any = lightning.LightningModule

    class Module(base):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: Any, index: int) -> Any:
            return self.model(**batch)["loss"]

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 0.1)

    trainer = lightning.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False, default_root_dir=str(folder),
        callbacks=[callback],
    )  # fmt: skip
    trainer.fit(Module(), torch.utils.data.DataLoader(Data(), batch_size=4))


TRAINERS = {"transformers": train_transformers, "lightning": train_lightning}


@pytest.mark.slow
@pytest.mark.parametrize("library", TRAINERS)
def test_tools_are_applied_around_a_training(
    library: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callback = amanda.callback(library, Flops(), scalars=f"tensorboard:{tmp_path / 'scalars'}")
    TRAINERS[library](tmp_path, callback, Model())
    # Two epochs of three steps.
    assert callback.results["Flops"].total.macs == 6 * FORWARD
    assert "Flops:\n" in capsys.readouterr().out
    before = callback.results["Flops"].total.macs
    nn.Linear(3, 2)(torch.ones(4, 3))
    assert callback.run.tools["Flops"].result().total.macs == before
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found = events.EventAccumulator(str(tmp_path / "scalars"))
    found.Reload()
    from tensorboard.util.tensor_util import make_ndarray

    events = found.Tensors("Flops/in_all_forward_macs")
    scalars = [(event.step, make_ndarray(event.tensor_proto).item()) for event in events]
    # By the steps of the optimizer: three in each epoch.
    assert scalars == [(3, 3 * FORWARD), (6, 6 * FORWARD)]


@pytest.mark.slow
@pytest.mark.parametrize("library", TRAINERS)
def test_nothing_stays_applied_after_an_exception(library: Any, tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="planted"),
        amanda.callback(library, "flops", show=False) as callback,
    ):
        TRAINERS[library](tmp_path, callback, Model(fails=True))
    result = callback.results["flops"]
    assert result.total.macs == FORWARD  # Of the step that ended.
    nn.Linear(3, 2)(torch.ones(4, 3))
    assert callback.run.tools["flops"].result().total.macs == FORWARD


@pytest.mark.slow
def test_lightning_says_so_itself(tmp_path: Path) -> None:
    callback = amanda.callback("lightning", "flops", show=False)
    with pytest.raises(RuntimeError, match="planted"):
        train_lightning(tmp_path, callback, Model(fails=True))
    nn.Linear(3, 2)(torch.ones(4, 3))
    assert callback.run.tools["flops"].result().total.macs == FORWARD


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize(("steps", "expected"), [(0, []), (4, [2, 4]), (5, [2, 4, 5])])
def test_the_last_step_is_logged_once(
    steps: int, expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from amanda_tools.training.run import TrainingRun

    logged: list[int] = []
    monkeypatch.setattr(ScalarLog, "log", lambda log, found, step: logged.append(step))
    run = TrainingRun([Flops()], f"tensorboard:{tmp_path}", every=2, show=False)
    run.begin()
    for step in range(steps):
        run.end_step(step + 1)
    run.close()
    assert logged == expected


@pytest.mark.one_interceptor
def test_scalars_have_the_global_step_of_the_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    from amanda_tools.training import run as module

    class Log:
        def __init__(self, target: str) -> None:
            assert target == "target"

        def log(self, found: Any, step: int) -> None:
            logged.append(step)

        def close(self) -> None:
            pass

    logged: list[int] = []
    monkeypatch.setattr(module, "ScalarLog", Log)
    every = module.TrainingRun([Flops()], "target", every=4, show=False)
    every.begin(10)  # A training that is continued, by batches of which three are a step,
    for step in (10, 10, 11, 11, 11, 12, 12, 12):
        every.end_step(step)
    every.end_step(17)  # or of which one call runs five.
    every.close()
    assert logged == [12, 17]
    logged.clear()
    epochs = module.TrainingRun([Flops()], "target", show=False)
    epochs.begin(100)
    for step in range(101, 106):
        epochs.end_step(step)
        if step == 103:
            epochs.end_epoch()
    epochs.close()  # An exception, or a last epoch that is shorter.
    assert logged == [103, 105]


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_steps_and_epochs_and_what_is_left_of_an_earlier_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from amanda_tools.training.run import TrainingRun

    with pytest.raises(ValueError, match="every must be at least 1"):
        TrainingRun(["flops"], every=0)
    logged: list[tuple[int, float]] = []

    def log(self: ScalarLog, found: Any, step: int) -> None:
        logged.append((step, found["Flops/in_all_forward_macs"]))

    monkeypatch.setattr(ScalarLog, "log", log)
    flops = Flops()
    run = TrainingRun([flops], f"tensorboard:{tmp_path}", every=2, show=False)
    linear, x = nn.Linear(3, 2), torch.ones(4, 3)
    run.begin()
    for step in range(5):
        linear(x)
        run.end_step(step + 1)
    run.end_epoch()
    run.close()
    assert logged == [(2, 2 * FORWARD), (4, 4 * FORWARD), (5, 5 * FORWARD)]
    run.begin()
    run.begin()  # An exception left the first.
    linear(x)
    assert flops.result().total.macs == 6 * FORWARD
    run.close()
    linear(x)
    assert flops.result().total.macs == 6 * FORWARD
    assert len(logged) == 3


@pytest.mark.one_interceptor
def test_scalars_of_results() -> None:
    tool = Flops()
    with amanda.apply(tool):
        nn.Linear(3, 2)(torch.ones(4, 3))
    found = scalars_of(tool.result())
    assert found["in_all_forward_macs"] == FORWARD
    assert found["in_all_flops_forward"] == 2 * FORWARD
    zeros = Sparsity()
    with amanda.apply(zeros):
        nn.Linear(4, 1, bias=False)(torch.tensor([[0.0, 0.0, 0.0, 1.0]]))
    # A share is in percent, as the name says.
    assert scalars_of(zeros.result())["macs_not_with_a_zero_percent"] == 25.0
    steps = [StepTime(0, wall=2_000_000, ops=500_000, calls=1, ended=True)]
    times = scalars_of(LatencyResult(steps=steps))
    assert (times["step_median_ms"], times["in_operators_percent"]) == (2.0, 25.0)

    class Own:
        def to_json(self) -> str:
            return '{"format": "own/1", "loss": 0.5, "ok": true, "rows": []}'

    assert scalars_of(Own()) == {"loss": 0.5}


@pytest.mark.one_interceptor
def test_errors_name_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="There is no callback for 'jax'"):
        amanda.callback("jax", "flops")
    with pytest.raises(ConfigError, match="No tool was given"):
        amanda.callback("keras")
    with pytest.raises(ConfigError, match="Two tools are called 'flops'"):
        amanda.callback("keras", "flops", "flops")
    with pytest.raises(ConfigError, match="cannot be logged to 'excel'"):
        ScalarLog("excel")
    for library in ("keras", "lightning.pytorch", "transformers", "mlflow", "wandb"):
        monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.setitem(sys.modules, "lightning", None)
    for library in ("keras", "lightning", "transformers"):
        with pytest.raises(MissingExtraError, match=rf"amanda-tools\[{library}\]"):
            amanda.callback(library, "flops")
    for target in ("mlflow", "wandb"):
        with pytest.raises(MissingExtraError, match=rf"amanda-tools\[{target}\]"):
            ScalarLog(target)


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_scalars_in_mlflow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow-skinny is not installed")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    log = ScalarLog("mlflow")
    run = mlflow.active_run().info.run_id
    log.log({"flops/forward (MACs)": 24.0}, 3)
    log.close()
    assert mlflow.active_run() is None
    (metric,) = mlflow.MlflowClient().get_metric_history(run, "flops/forward MACs")
    assert (metric.step, metric.value) == (3, 24.0)


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_scalars_in_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wandb = pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path))
    monkeypatch.setenv("WANDB_SILENT", "true")
    log = ScalarLog("wandb")
    log.log({"flops/forward (MACs)": 24.0}, 3)
    assert wandb.run.summary["flops/forward (MACs)"] == 24.0
    assert wandb.run.summary["amanda/step"] == 3
    log.close()
    assert wandb.run is None
    assert list(tmp_path.rglob("*.wandb"))
