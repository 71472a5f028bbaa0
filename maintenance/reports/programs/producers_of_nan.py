"""What makes a NaN is told from what passes it on.

Report: https://github.com/pytorch/pytorch/issues/182156
Command: amanda run -t nonfinite producers_of_nan.py
Right: (len(nonfinite["faults"]), nonfinite["passed_on"]) == (1, 3)
"""

import torch
from torch import nn


class Root(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values.sqrt()


nn.Sequential(nn.Identity(), Root(), nn.Tanh(), nn.Sigmoid(), nn.ReLU())(-torch.ones(2))
