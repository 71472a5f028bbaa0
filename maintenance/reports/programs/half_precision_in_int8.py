"""Weights of half precision in eight bits: no value after them is NaN.

Report: https://github.com/pytorch/ao/issues/1662
Command: amanda run -t quantize:activations=none -t nonfinite half_precision_in_int8.py
Right: len(nonfinite["faults"]) == 0 and quantize["reached"] == 2 * 8 * 8
"""

import torch
from torch import nn

torch.manual_seed(23)
model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.LayerNorm(8), nn.Linear(8, 8, bias=False))
with torch.no_grad():
    model[0].weight[0].mul_(1e-6)  # Its scale is below the smallest normal number.
model.half()
for _ in range(3):
    model(torch.full((2, 8), 1e-3, dtype=torch.float16))
