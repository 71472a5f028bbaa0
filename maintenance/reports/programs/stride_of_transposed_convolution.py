"""FLOPs of a transposed convolution with a stride: those of its input.

Report: https://github.com/sovrasov/flops-counter.pytorch/issues/57
Command: amanda run -t flops stride_of_transposed_convolution.py
Right: flops["total"]["macs"] == (4 * 4) * 3 * 5 * (2 * 2)
"""

import torch
from torch import nn

nn.ConvTranspose2d(3, 5, (2, 2), stride=2)(torch.ones(1, 3, 4, 4))
