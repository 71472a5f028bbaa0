"""The scale of each channel of a quantized weight.

Report: https://github.com/Xilinx/brevitas/issues/58
Command: amanda run -t quantize scale_of_a_weight.py
Right: len(quantize["weights"][0]["scales"]) == 6
"""

import torch
from torch import nn

layer = nn.Conv2d(3, 6, 5)
for _ in range(2):
    layer(torch.ones(1, 3, 8, 8))
