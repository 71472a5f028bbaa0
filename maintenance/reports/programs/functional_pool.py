"""A function in `forward` is an operator like a module.

Report: https://github.com/eml-eda/plinio/issues/12
Command: amanda run -t capture:ops=adaptive_avg_pool2d functional_pool.py
Right: [value.shape for value in values("capture")] == [(1, 3, 1, 1)]
"""

import torch
from torch import nn
from torch.nn import functional


class Net(nn.Module):
    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return functional.adaptive_avg_pool2d(values, (1, 1))


Net()(torch.ones(1, 3, 4, 4))
