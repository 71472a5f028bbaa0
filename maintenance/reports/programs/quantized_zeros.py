"""An activation of which all values are zero has a scale, and stays zero.

Report: https://github.com/pytorch/pytorch/issues/39239
Command: amanda run -t quantize quantized_zeros.py
Right: printed.split() == ["0.0", "0.0", "0.0"]
"""

import torch
from torch import nn

layer = nn.Linear(4, 2, bias=False)
for _ in range(3):
    print(layer(torch.zeros(1, 4)).abs().max().item())
