"""A typical training script: independent of Amanda, prints its results."""

from __future__ import annotations

import argparse
import os
import sys
import time

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn


class Network(nn.Module):
    """Two convolutions and two linear layers for images of 8 by 8."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1), nn.ReLU()
        )
        self.hidden = nn.Linear(16 * 4 * 4, 32)
        self.head = nn.Linear(32, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = F.max_pool2d(self.features(images), 2).flatten(1)
        logits: Tensor = self.head(torch.relu(self.hidden(x)))
        return logits


def main() -> None:
    """Train and test, and end as requested."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--fail", action="store_true", help="end by an exception")
    parser.add_argument("--exit", type=int, help="end by sys.exit")
    parser.add_argument("--wait", action="store_true", help="wait when the first epoch is over")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank = int(os.environ.get("RANK", "0"))
    processes = int(os.environ.get("WORLD_SIZE", "1"))
    if processes > 1:
        torch.distributed.init_process_group("gloo")
    digits = load_digits()
    images = torch.from_numpy(digits.images.astype(np.float32)[:, None] / 16)
    labels = torch.from_numpy(digits.target)
    network = Network()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for epoch in range(arguments.epochs):
        for start in range(rank * 32, 1472, processes * 32):
            loss = F.cross_entropy(network(images[start : start + 32]), labels[start : start + 32])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            if processes > 1:
                for parameter in network.parameters():
                    torch.distributed.all_reduce(parameter.grad)
            optimizer.step()
        print(f"rank {rank} epoch {epoch}: loss {loss.item()!r}", flush=True)
        if arguments.wait:
            time.sleep(60)
    if arguments.fail:
        raise ValueError("the training diverged")
    with torch.no_grad():
        right = (network(images[1500:]).argmax(1) == labels[1500:]).float().mean()
    print(f"rank {rank} accuracy {right.item():.3f}")
    if processes > 1:
        torch.distributed.destroy_process_group()
    if arguments.exit is not None:
        sys.exit(arguments.exit)


if __name__ == "__main__":
    main()
