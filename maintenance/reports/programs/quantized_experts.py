"""The weights of experts are quantized although no `nn.Linear` holds them.

Report: https://github.com/pytorch/torchtitan/pull/3199
Command: amanda run -t quantize quantized_experts.py
Right: quantize["reached"] == quantize["parameters"] == 2 * 4 * 8
"""

import torch
from torch import nn


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(2, 4, 8))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return torch.bmm(values, self.w1)


model = Experts()
for _ in range(2):
    model(torch.ones(2, 3, 4))
