"""FLOPs of a block that is recomputed in the backward pass count once more.

Report: https://github.com/deepspeedai/DeepSpeed/pull/3362
Command: amanda run -t flops flops_of_a_checkpoint.py
Right: flops["total"]["macs"] + flops["total"]["backward_macs"] == 4 * (2 * 8 * 4)
"""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

model = nn.Linear(8, 4)
values = torch.ones(2, 8, requires_grad=True)
checkpoint(model, values, use_reentrant=True).sum().backward()
