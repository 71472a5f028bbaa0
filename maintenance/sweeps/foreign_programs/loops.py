"""Training loops: other libraries, data workers, mixed precision, recomputation, closures."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# Much in torch and the libraries is not annotated.

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, WRITTEN, net, program, samples, times, train


@program(
    "lightning: fit, validate, checkpoint",
    # Two epochs of three batches, each followed by a validation of two.
    {"linear": 20, "relu": 10, "cross_entropy_loss": 10},
    times(2, EPOCH_BACKWARD),
    needs=("lightning",),
)
def lightning_loop(note: Note) -> None:
    """Train a LightningModule with validation, a checkpoint and a schedule."""
    import lightning

    class Lit(lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def training_step(self, batch: Any, index: int) -> Any:
            loss = F.cross_entropy(self.net(batch[0]), batch[1])
            self.log("loss", loss)
            note(f"loss {self.current_epoch} {index}", loss)
            return loss

        def validation_step(self, batch: Any, index: int) -> None:
            self.log("validated", F.cross_entropy(self.net(batch[0]), batch[1]))

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
            return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]

    lit = Lit()
    with tempfile.TemporaryDirectory() as folder:
        trainer = lightning.Trainer(
            max_epochs=2,
            accelerator="cpu",
            devices=1,
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            num_sanity_val_steps=0,
            gradient_clip_val=0.5,
            default_root_dir=folder,
        )
        data = samples()
        trainer.fit(lit, DataLoader(data, 4, shuffle=True), DataLoader(data, 6))
        (path,) = Path(folder).glob("**/*.ckpt")
        note("checkpoint", torch.load(path, weights_only=False)["state_dict"])
    note("parameters", list(lit.parameters()))
    note("validated", trainer.callback_metrics["validated"])


@program(
    "accelerate: prepare, accumulate, clip, save",
    times(2, EPOCH),
    times(2, EPOCH_BACKWARD),
    needs=("accelerate",),
)
def accelerate_loop(note: Note) -> None:
    """Train with accelerate, with gradients accumulated over two batches."""
    import accelerate
    from accelerate.state import AcceleratorState, GradientState

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    try:
        model = net()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.9**step)
        loader = DataLoader(samples(), 4, shuffle=True)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        for _ in range(2):
            for features, labels in loader:
                with accelerator.accumulate(model):
                    loss = F.cross_entropy(model(features), labels)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients:
                        note("norm", accelerator.clip_grad_norm_(model.parameters(), 0.5))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                note("gathered", accelerator.gather_for_metrics(loss.detach()))
                note.training(model, loss)
        with tempfile.TemporaryDirectory() as folder:
            accelerator.save_state(folder)
            accelerator.load_state(folder)
        note("unwrapped", list(accelerator.unwrap_model(model).parameters()))
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()


@program(
    "transformers: Trainer",
    {"embedding": 12},
    needs=("accelerate", "transformers"),
)
def trainer_loop(note: Note) -> None:
    """Train a small GPT-2 with the Trainer of transformers, two epochs of three batches."""
    import transformers

    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, n_positions=8, vocab_size=16)
    model = transformers.GPT2LMHeadModel(config)
    ids = torch.randint(0, 16, (12, 5))
    data = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        arguments = transformers.TrainingArguments(
            output_dir=folder,
            num_train_epochs=2,
            per_device_train_batch_size=4,
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
            use_cpu=True,
            logging_strategy="no",
        )
        trainer = transformers.Trainer(model=model, args=arguments, train_dataset=data)
        result = trainer.train()
    note("loss", torch.tensor(result.training_loss))
    note("parameters", list(model.parameters()))


def in_a_worker(batch: list[Any]) -> Any:
    """Collate a batch with operators in a worker."""
    features, labels = (torch.stack(part) for part in zip(*batch, strict=True))
    return features * 2 + torch.rand(()), labels


def _loader(method: str, workers: int) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        loader = DataLoader(
            samples(),
            4,
            shuffle=True,
            num_workers=workers,
            collate_fn=in_a_worker,
            multiprocessing_context=method if workers else None,
            persistent_workers=bool(workers),
        )
        model = net()
        for _ in range(2):
            train(note, model, loader)

    return run


for _method, _workers in (("fork", 2), ("spawn", 1), ("none", 0)):
    program(
        f"data loader: {_workers} workers by {_method}",
        times(2, EPOCH),
        times(2, EPOCH_BACKWARD),
    )(_loader(_method, _workers))


@program("autocast and GradScaler", EPOCH, {"ReluBackward0": 3, "NllLossBackward0": 3})
def autocast(note: Note) -> None:
    """Train with mixed precision on the CPU, with scaled and clipped gradients."""
    model, scaler = net(), torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for features, labels in DataLoader(samples(), 4):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = model(features)
            with torch.autocast("cpu", enabled=False):
                loss = F.cross_entropy(output.float(), labels)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        note("output", output)
        note.training(model, loss)
        note(f"scale {scaler.get_scale()}", scaler.get_scale())


def _checkpointed(reentrant: bool) -> Callable[[Note], None]:
    from torch.utils.checkpoint import checkpoint, checkpoint_sequential

    def run(note: Note) -> None:
        first, second = net(), nn.Sequential(*(nn.Linear(3, 3) for _ in range(4)))
        model = nn.ModuleList([first, second])

        def forward(x: torch.Tensor) -> Any:
            hidden = checkpoint(first, x, use_reentrant=reentrant)
            return checkpoint_sequential(second, 2, hidden, use_reentrant=reentrant)

        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for features, labels in DataLoader(samples(), 4):
            optimizer.zero_grad()
            # The reentrant variant needs an input that requires gradients.
            loss = F.cross_entropy(forward(features.requires_grad_()), labels)
            loss.backward()
            optimizer.step()
            note("gradient of the input", features.grad)
            note.training(model, loss)

    return run


for _reentrant in (False, True):
    # Each layer runs once and once more when it is recomputed, except in the last segment.
    program(
        f"gradient checkpointing: use_reentrant={_reentrant}",
        {"cross_entropy_loss": 3},
        {"AddmmBackward0": 3 * 6, "ReluBackward0": 3},
    )(_checkpointed(_reentrant))


@program(
    "closures: LBFGS; averaged weights; schedules",
    left_alone=dict.fromkeys(("detach",), WRITTEN),
)
def closures(note: Note) -> None:
    """Train with an optimizer that calls the model any number of times."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4, line_search_fn="strong_wolfe")
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4)
    (features, labels) = samples().tensors

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(features), labels)
        loss.backward()
        return loss

    for _ in range(2):
        loss: Any = optimizer.step(closure)
        schedule.step()
        averaged.update_parameters(model)
        note.training(model, loss)
    note("averaged", list(averaged.parameters()))


OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adagrad", "RMSprop", "NAdam", "RAdam", "Adamax", "Adadelta")


@program(
    "optimizers: foreach and for-loop",
    times(2 * len(OPTIMIZERS), EPOCH),
    times(2 * len(OPTIMIZERS), EPOCH_BACKWARD),
)
def optimizers(note: Note) -> None:
    """Train an epoch with each optimizer, in both of its implementations."""
    for name in OPTIMIZERS:
        for foreach in (False, True):
            model = net()
            made = getattr(torch.optim, name)(model.parameters(), lr=0.01, foreach=foreach)
            train(note, model, DataLoader(samples(), 4), made)
