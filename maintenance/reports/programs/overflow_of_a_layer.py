"""The layer in which half precision overflows.

Report: https://github.com/bitsandbytes-foundation/bitsandbytes/issues/165
Command: amanda run -t nonfinite overflow_of_a_layer.py
Right: [fault["module"] for fault in nonfinite["faults"]] == ["1"]
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False), nn.ReLU())
for layer, scale in ((model[0], 100.0), (model[1], 1000.0)):
    nn.init.constant_(layer.weight, scale)
model.to(torch.bfloat16).half()(torch.ones(1, 4, dtype=torch.half))
