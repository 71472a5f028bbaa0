"""Memory that grows, since a sum of losses keeps the graphs of all steps.

Report: https://github.com/pytorch/pytorch/issues/1840
Command: amanda run -t memory kept_graphs.py
Right: memory["steps"][-1]["live"] > memory["steps"][1]["live"] + 1000
"""

import torch
from torch import nn

model = nn.Linear(64, 64)
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
total = torch.zeros(())
for _ in range(5):
    loss = model(torch.ones(8, 64)).tanh().square().sum()
    total = total + loss
    optimizer.zero_grad()
    loss.backward(retain_graph=True)
    optimizer.step()
