"""FLOPs in `inference_mode` are those outside of it.

Report: https://github.com/pytorch/pytorch/issues/126268
Command: amanda run -t flops flops_in_inference_mode.py
Right: flops["total"]["macs"] == 2 * 8 * 4
"""

import torch
from torch import nn

model = nn.Linear(8, 4)
with torch.inference_mode():
    model(torch.ones(2, 8))
