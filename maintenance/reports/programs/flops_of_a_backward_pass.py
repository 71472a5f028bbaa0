"""FLOPs of the backward pass: the gradients of a weight and of an input.

Report: https://github.com/pytorch/pytorch/issues/69782
Command: amanda run -t flops flops_of_a_backward_pass.py
Right: flops["total"]["backward_macs"] == 2 * (2 * 8 * 4)
"""

import torch
from torch import nn

model = nn.Linear(8, 4)
model(torch.ones(2, 8, requires_grad=True)).sum().backward()
