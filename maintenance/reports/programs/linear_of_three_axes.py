"""MACs of a linear layer on an input with three axes: those of each row.

Report: https://github.com/TylerYep/torchinfo/issues/77
Command: amanda run -t flops linear_of_three_axes.py
Right: flops["total"]["macs"] == 1 * 44 * 64 * 256
"""

import torch
from torch import nn

nn.Linear(64, 256)(torch.ones(1, 44, 64))
