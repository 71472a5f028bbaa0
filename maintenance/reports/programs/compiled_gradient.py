"""An edit of gradients works in a compiled function.

Report: https://github.com/pytorch/pytorch/issues/117265
Command: amanda run -t inject_faults:ops=linear,site=gradient,model=scale,amount=2,rate=1 compiled_gradient.py
Right: printed.strip() == "[2.0, 2.0, 2.0]"
"""

import torch
from torch import nn

layer = nn.Linear(3, 3, bias=False)
layer.weight = nn.Parameter(torch.eye(3))
values = torch.ones(1, 3, requires_grad=True)
torch.compile(layer, backend="aot_eager", fullgraph=True)(values).sum().backward()
print(values.grad[0].tolist())
