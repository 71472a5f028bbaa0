"""Which bits matter: one flip in each run of a network that has learned digits.

Needs torch, scikit-learn (which has the data) and amanda-tools:

    python examples/faults/flip_bits.py --trials 200 --out campaign.csv
    python examples/faults/flip_bits.py --trials 100 --png bits.png
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path
from typing import Any

import torch
from torch import nn

from amanda_tools.faults import CampaignResult, InjectFaults, run_campaign


@functools.cache
def trained() -> tuple[nn.Module, torch.Tensor]:
    """Return a network that has learned 1,400 digits, and the images of 50 others."""
    from sklearn.datasets import load_digits

    found: Any = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32)[:, None] / 16
    y = torch.tensor(found.target)
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(256, 10)),
    )
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(5):
        for batch in torch.randperm(1400).split(50):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            optimizer.step()
    return model, x[1400:1450]


def campaign(site: Any, bits: Any, trials: int) -> CampaignResult:
    """Return the outcomes of one flip per run."""
    model, images = trained()

    def program() -> torch.Tensor:
        with torch.no_grad():
            logits: torch.Tensor = model(images)
        return logits

    tool = InjectFaults(site=site, bits=bits, mode="per_run", seed=1)
    return run_campaign(tool, program, trials)


def draw(trials: int, path: Path) -> None:
    """Draw the rate of wrong predictions for each bit of a weight, with Wilson's intervals."""
    import matplotlib.pyplot as plt

    bits = range(31, 19, -1)
    rates = [campaign("weight", [bit], trials).rate("sdc") for bit in bits]
    figure, axis = plt.subplots(figsize=(6, 3.4), constrained_layout=True)
    for bit, (rate, low, high) in zip(bits, rates, strict=True):
        axis.errorbar(
            bit, 100 * rate, [[100 * (rate - low)], [100 * (high - rate)]], fmt="o", color="C0"
        )
    axis.axvspan(22.5, 30.5, color="C1", alpha=0.12, label="exponent")
    axis.set(xlabel="flipped bit of a float32 weight", ylabel="runs with another class (%)")
    axis.set(xlim=(31.7, 19.3), xticks=bits)
    axis.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> None:
    """Print the rates by site and bit."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--out", type=Path, help="a CSV file of the last campaign")
    parser.add_argument("--png", type=Path, help="a chart of the bits of weights")
    given = parser.parse_args()
    if given.png:
        draw(given.trials, given.png)
        return
    for site in ("weight", "output"):
        for bits in ("sign", [30], "exponent", "mantissa"):
            found = campaign(site, bits, given.trials)
            wrong, low, high = found.rate("sdc")
            name = bits if isinstance(bits, str) else f"bit {bits[0]}"
            print(f"{site:7} {name:9} {wrong:6.1%} of runs are wrong ({low:.1%} to {high:.1%})")
    if given.out:
        found.write_csv(given.out)


if __name__ == "__main__":
    main()
