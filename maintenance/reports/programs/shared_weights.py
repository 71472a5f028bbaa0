"""FLOPs of a layer that is used three times: each use counts once.

Report: https://github.com/deepspeedai/DeepSpeed/issues/7256
Command: amanda run -t flops shared_weights.py
Right: flops["total"]["macs"] == 3 * 100 * 100
"""

import torch
from torch import nn

layer = nn.Linear(100, 100, bias=False)
pieces = torch.ones(1, 300).split(100, dim=1)
torch.cat([layer(piece) for piece in pieces], dim=1)
