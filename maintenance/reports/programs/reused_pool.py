"""A module that is called twice gives two values.

Report: https://github.com/meta-pytorch/captum/issues/200
Command: amanda run -t capture:modules=pool reused_pool.py
Right: [value.shape for value in values("capture")] == [(1, 3, 4, 4), (1, 3, 2, 2)]
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.pool = nn.MaxPool2d(2, 2)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.pool(self.pool(values))


Net()(torch.ones(1, 3, 8, 8))
