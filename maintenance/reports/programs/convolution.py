"""MACs of a convolution: one per element of the kernel, input channel and output.

Report: https://github.com/TylerYep/torchinfo/issues/72
Command: amanda run -t flops convolution.py
Right: flops["total"]["macs"] == (8 * 8) * 3 * 16 * (3 * 3)
"""

import torch
from torch import nn

nn.Conv2d(3, 16, 3, padding=1)(torch.ones(1, 3, 8, 8))
