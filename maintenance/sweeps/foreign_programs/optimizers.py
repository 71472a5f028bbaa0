"""Programs with optimizers of libraries, which multiply, decompose, and write as they like."""

# mypy: allow-untyped-calls, allow-untyped-decorators
# mypy: disable-error-code="import-not-found,import-untyped,unused-ignore"
# Much in torch and the libraries is not annotated, and few of them are installed for the checks.

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from maintenance.sweeps.foreign import Note

from .catalog import EPOCH, EPOCH_BACKWARD, net, program, samples, train

#: Module -> optimizers in it, each trained for one epoch. Only the model's operators are counted.
_OPTIMIZERS = {
    "lion_pytorch": ("Lion",),
    "schedulefree": ("AdamWScheduleFree", "SGDScheduleFree"),
    "prodigyopt": ("Prodigy",),
    "pytorch_optimizer": (
        "AdaBelief", "AdamMini", "AdEMAMix", "Adan", "GrokFastAdamW", "Kron", "MARS", "Muon",
        "Shampoo", "SOAP",
    ),
}  # fmt: skip


def _made(module: str, name: str, model: nn.Module) -> Any:
    kind = getattr(importlib.import_module(module), name)
    parameters: Any = model.parameters()
    if name == "AdamMini":
        parameters = model  # It reads the names.
    if name == "Muon":
        parameters = [
            {"params": [p for p in model.parameters() if (p.ndim == 2) == uses], "use_muon": uses}
            for uses in (True, False)
        ]
    return kind(parameters, lr=1e-3)


def _trained(module: str, name: str) -> Callable[[Note], None]:
    def run(note: Note) -> None:
        model = net()
        optimizer = _made(module, name, model)
        if module == "schedulefree":
            optimizer.train()
        train(note, model, DataLoader(samples(), 4), optimizer)

    run.__doc__ = f"Train with {name}."
    return run


for _module, _names in _OPTIMIZERS.items():
    for _name in _names:
        _title = f"{_module.replace('_', '-')}: {_name}"
        program(_title, {**EPOCH}, EPOCH_BACKWARD, needs=(_module,))(_trained(_module, _name))


@program("pytorch-optimizer: SAM, which computes the loss twice", needs=("pytorch_optimizer",))
def sharpness(note: Note) -> None:
    """Take two steps, the second with the gradient at the point of the first."""
    from pytorch_optimizer import SAM

    model, x = net(), torch.randn(4, 6)
    optimizer = SAM(model.parameters(), torch.optim.SGD, lr=0.1)
    for _ in range(2):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.first_step(zero_grad=True)
        model(x).square().mean().backward()
        optimizer.second_step(zero_grad=True)
        note.training(model, loss)
