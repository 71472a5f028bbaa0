"""Modules that `forward` makes are seen: their operators are.

Report: https://github.com/meta-pytorch/captum/issues/1082
Command: amanda run -t capture:ops=relu relu_made_in_forward.py
Right: len(values("capture")) == 2
"""

import torch
from torch import nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return nn.ReLU()(self.second(nn.ReLU()(self.first(values))))


Net()(torch.ones(1, 4))
