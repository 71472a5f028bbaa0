"""The scale of the input of a convolution.

Report: https://github.com/Xilinx/brevitas/issues/326
Command: amanda run -t quantize scale_of_an_input.py
Right: len(quantize["activations"]) == 1
"""

import torch
from torch import nn

layer = nn.Conv2d(3, 6, 5)
for _ in range(2):
    layer(torch.ones(1, 3, 8, 8))
