"""A tool that watches gradients keeps no tensors of the program.

Report: https://github.com/wandb/wandb/issues/2644
Command: amanda run -t nonfinite:norms=true -t memory memory_of_watching.py
Right: memory["steps"][-1]["live"] == memory["steps"][1]["live"]
"""

import torch
from torch import nn

model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(5):
    optimizer.zero_grad()
    model(torch.ones(8, 64)).sum().backward()
    optimizer.step()
