"""A weight that two calls share is quantized once.

Report: https://github.com/openvinotoolkit/nncf/pull/889
Command: amanda run -t quantize shared_quantized_weight.py
Right: len(quantize["weights"]) == 1 and quantize["reached"] == 16
"""

import torch
from torch import nn

layer = nn.Linear(4, 4)
model = nn.Sequential(layer, nn.ReLU(), layer)
for _ in range(2):
    model(torch.ones(1, 4))
