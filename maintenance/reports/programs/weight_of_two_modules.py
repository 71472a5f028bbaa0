"""A weight that two modules have is quantized once, in both.

Report: https://github.com/pytorch/ao/pull/265
Command: amanda run -t quantize:activations=none weight_of_two_modules.py
Right: len(quantize["weights"]) == 1 and quantize["reached"] == quantize["parameters"] == 16
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.ReLU(), nn.Linear(4, 4, bias=False))
model[2].weight = model[0].weight
for _ in range(3):
    model(torch.ones(1, 4))
