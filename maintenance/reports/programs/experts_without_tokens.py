"""An expert that gets no tokens in the calibration is quantized when it runs first, and one that
never does is named.

Report: https://github.com/NVIDIA/Model-Optimizer/pull/970
Command: amanda run -t quantize:calibration=2 experts_without_tokens.py
Right: quantize["uncalibrated"] == ["experts.2.weight"]
"""

import torch
from torch import nn


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        return self.experts[chosen](x)


model = Mixture()
for chosen in (0, 0, 0, 1, 1):
    model(torch.ones(2, 4), chosen)
