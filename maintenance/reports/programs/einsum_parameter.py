"""FLOPs of a layer that is an `einsum` with a parameter.

Report: https://github.com/sovrasov/flops-counter.pytorch/issues/105
Command: amanda run -t flops einsum_parameter.py
Right: flops["by_module"]["mix"]["macs"] == 8 * 8 * 16 * 4
"""

import torch
from torch import nn


class Mix(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 4))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.einsum("bhwi,io->bhwo", values, self.weight)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mix = Mix()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return self.mix(values)


Net()(torch.ones(1, 8, 8, 16))
