"""Memory by kind: weights, gradients, activations, states of an optimizer.

Report: https://github.com/Oldpan/Pytorch-Memory-Utils/issues/3
Command: amanda run -t memory what_takes_memory.py
Right: memory["kinds_at_peak"]["weights"] == 4 * 64 * 64
"""

import torch
from torch import nn

model = nn.Linear(64, 64, bias=False)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
for _ in range(3):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
