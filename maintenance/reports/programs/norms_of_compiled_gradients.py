"""Norms of the gradients of a compiled model.

Report: https://github.com/wandb/wandb/issues/10221
Command: amanda run -t nonfinite:norms=true norms_of_compiled_gradients.py
Right: len(nonfinite["gradient_steps"]) >= 1
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
compiled = torch.compile(model, backend="aot_eager")
for _ in range(2):
    optimizer.zero_grad()
    compiled(torch.ones(2, 4)).sum().backward()
    optimizer.step()
