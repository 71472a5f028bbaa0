"""FLOPs of `nn.MultiheadAttention`, whose weights no module reads.

Report: https://github.com/lartpang/MethodsCmp/issues/1
Command: amanda run -t flops multihead_attention.py
Right: flops["total"]["macs"] == 4 * 16 * 32 * 32 + 2 * 16 * 16 * 32
"""

import torch
from torch import nn

layer = nn.MultiheadAttention(32, 4, batch_first=True)
values = torch.ones(1, 16, 32)
layer(values, values, values)
