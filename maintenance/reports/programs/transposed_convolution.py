"""FLOPs of a transposed convolution.

Report: https://github.com/facebookresearch/fvcore/issues/78
Command: amanda run -t flops transposed_convolution.py
Right: flops["total"]["macs"] == 32 * 3 * 3
"""

import torch
from torch import nn

nn.ConvTranspose2d(32, 1, (3, 3))(torch.ones(1, 32, 1, 1))
