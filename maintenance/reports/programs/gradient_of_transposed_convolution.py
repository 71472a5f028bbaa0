"""FLOPs of the gradients of a transposed convolution.

Report: https://github.com/pytorch/pytorch/issues/119806
Command: amanda run -t flops gradient_of_transposed_convolution.py
Right: flops["total"]["backward_macs"] == 2 * (4 * 4) * 3 * 5 * (2 * 2)
"""

import torch
from torch import nn

layer = nn.ConvTranspose2d(3, 5, (2, 2), stride=2)
layer(torch.ones(1, 3, 4, 4, requires_grad=True)).sum().backward()
