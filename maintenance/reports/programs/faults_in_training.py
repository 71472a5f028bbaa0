"""Faults in the weights during training: the optimizer changes the weights themselves.

Report: https://github.com/pytorchfi/pytorchfi/issues/39
Command: amanda run -t inject_faults:site=weight,model=zero,rate=1 faults_in_training.py
Right: printed.split() == ["0.0", "1.5"]
"""

import torch
from torch import nn

model = nn.Linear(1, 1, bias=False)
nn.init.constant_(model.weight, 1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
loss = -model(torch.ones(1, 1)).sum()
loss.backward()
optimizer.step()
print(abs(loss.item()), model.weight.item())
