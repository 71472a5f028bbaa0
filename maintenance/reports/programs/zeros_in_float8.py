"""A weight and an activation of zeros stay zero in eight-bit floating-point numbers.

Report: https://github.com/pytorch/ao/issues/4713
Command: amanda run -t quantize:weights=fp8_e4m3,activations=fp8_e4m3 zeros_in_float8.py
Right: printed.split() == ["0.0", "0.0", "0.0"]
"""

import torch
from torch import nn

layer = nn.Linear(4, 2, bias=False)
nn.init.zeros_(layer.weight)
for _ in range(3):
    print(layer(torch.zeros(1, 4)).abs().max().item())
