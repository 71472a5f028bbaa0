"""FLOPs of equal training steps are equal.

Report: https://github.com/deepspeedai/DeepSpeed/issues/2292
Command: amanda run -t flops flops_of_each_step.py
Right: flops["total"]["macs"] == 3 * (2 * 8 * 4)
"""

import torch
from torch import nn

model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
