"""MACs of a convolution in groups: each output channel reads the channels of its group.

Report: https://github.com/facebookresearch/fvcore/issues/45
Command: amanda run -t flops grouped_convolution.py
Right: flops["total"]["macs"] == (8 * 6 * 6) * (3 * 3 * 4 // 2)
"""

import torch
from torch import nn

nn.Conv2d(4, 8, 3, groups=2)(torch.ones(1, 4, 8, 8))
