"""Values of modules of a model compiled with `fullgraph=True`.

Report: https://github.com/pytorch/pytorch/issues/173452
Command: amanda run -t capture:modules=1 compiled_fullgraph.py
Right: len(values("capture")) == 1
"""

import torch
from torch import nn

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
torch.compile(model, fullgraph=True, backend="aot_eager")(torch.ones(1, 4))
