"""The operands of a residual addition are quantized.

Report: https://github.com/Xilinx/brevitas/issues/168
Command: amanda run -t quantize quantized_addition.py
Right: sum("add" in one["op"] for one in quantize["activations"]) == 2
"""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * 2 + self.layer(values)


model = Block()
for _ in range(2):
    model(torch.ones(1, 4))
