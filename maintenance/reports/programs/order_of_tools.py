"""What a tool reads does not change what another one edits, in whichever order they come.

Report: https://github.com/ndif-team/nnsight/issues/398
Command: amanda run -t capture:modules=0 -t inject_faults:ops=linear,model=zero,rate=1 -t after=capture:modules=1 order_of_tools.py
Right: printed.split() == ["0.0"]
"""

import torch
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
print(model(torch.ones(1, 4)).abs().max().item())
