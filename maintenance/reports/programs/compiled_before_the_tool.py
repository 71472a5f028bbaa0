"""Values of a program that was compiled and ran before the tool came.

Report: https://github.com/pytorch/pytorch/issues/117758
Command: amanda run -t trace compiled_before_the_tool.py
Right: printed.strip() == "4"
"""

import torch
from torch import nn

import amanda
from amanda_tools.capture import Capture

model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU())
compiled = torch.compile(model, backend="aot_eager")
compiled(torch.ones(1, 4))
tool = Capture(modules=["*0", "*1", "*2", "*3"])
with amanda.apply(tool):
    compiled(torch.ones(1, 4))
print(len(tool.result().values))
