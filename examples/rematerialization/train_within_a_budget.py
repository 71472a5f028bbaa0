"""Train a network on handwritten digits within shrinking memory budgets.

Run it from any folder; it needs amanda-core, amanda-tools, amanda-driver-torch and scikit-learn:

    python train_within_a_budget.py

It prints, for each budget, the peak of the bytes in use, how many operators ran again, and whether
the trained parameters equal those of a plain training bit for bit.
"""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

import amanda
from amanda_tools.rematerialize import Rematerialize

WIDTH, DEPTH = 32, 8


def train(tool: Rematerialize | None = None) -> list[torch.Tensor]:
    """Train for four steps and return the parameters."""
    digits = load_digits()
    images = torch.tensor(digits.images[:256], dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target[:256])
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for number in range(DEPTH):
        layers += [nn.Conv2d(WIDTH if number else 1, WIDTH, 3, padding=1), nn.ReLU()]
        layers += [nn.Dropout(0.1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * WIDTH, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)

    def steps() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(images), labels).backward()
            optimizer.step()

    if tool is None:
        steps()
    else:
        with amanda.apply(tool):
            steps()
    return [parameter.detach() for parameter in model.parameters()]


def main() -> None:
    """Print the table."""
    plain, watching = train(), Rematerialize()
    train(watching)
    free = watching.result()
    print(f"without a budget: {free.peak:,} bytes; at least {free.floor:,} are needed")
    for part in (0.8, 0.6, 0.5, 0.4, 0.3):
        budget = max(round(part * free.peak), free.floor)
        tool = Rematerialize(budget)
        same = all(map(torch.equal, train(tool), plain))
        result = tool.result()
        print(
            f"{part:.0%}: peak {result.peak:,} of {budget:,}; "
            f"{sum(op.repeated for op in result.ops)} operators ran again; "
            f"parameters {'as plain' if same else 'DIFFERENT'}"
        )


if __name__ == "__main__":
    main()
