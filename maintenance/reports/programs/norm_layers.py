"""FLOPs of `LayerNorm`, where they are asked for.

Report: https://github.com/sovrasov/flops-counter.pytorch/issues/107
Command: amanda run -t flops:include=[norm] norm_layers.py
Right: [row["type"] for row in flops["ops"]] == ["layer_norm"]
"""

import torch
from torch import nn

nn.LayerNorm(8)(torch.ones(2, 8))
