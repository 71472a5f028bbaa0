"""A network for faults: each of its operators stands on a line of its own.

The lines that faults are planted at are marked with the name of the fault.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

__all__ = ["Network", "inputs"]


class Network(nn.Module):
    """Convolutions, then attention over their channels, and words that are added."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1, bias=False)
        self.deep = nn.Conv2d(8, 8, 3, padding=1, groups=2)
        self.norm = nn.LayerNorm(16)
        self.words = nn.Embedding(11, 16)
        self.query, self.key, self.value = (nn.Linear(16, 16) for _ in range(3))
        self.out = nn.Linear(16, 16)
        self.last = nn.Linear(16, 5)
        self.slope = nn.PReLU(8)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        """Return the logarithms of five probabilities for each channel."""
        x = self.stem(x)  # kernel
        x = functional.relu(x)  # activation
        x = self.deep(x)  # padding
        x = self.slope(x)  # slope
        x = functional.avg_pool2d(x, 3, stride=2, padding=1)  # pool
        x = x.flatten(2)
        x = self.norm(x)  # epsilon
        x = x + self.words(rows)  # row
        query = self.query(x)
        key = self.key(x)  # bias
        value = self.value(x)  # dtype
        scores = query @ key.transpose(1, 2)
        scores = scores * (1 / math.sqrt(16))  # scale
        scores = scores.masked_fill(mask, -1e4)  # mask
        scores = scores.softmax(-1)  # axis
        x = scores @ value
        x = self.out(x)  # transposed
        x = functional.gelu(x)  # gelu
        return functional.log_softmax(self.last(x), -1)


def inputs() -> tuple[Tensor, Tensor, Tensor]:
    """Return images, numbers of words, and what may not be attended to."""
    torch.manual_seed(1)
    mask = torch.ones(8, 8, dtype=torch.bool).triu(1)[None]
    return torch.randn(2, 3, 8, 8), torch.randint(0, 11, (2, 8)), mask
