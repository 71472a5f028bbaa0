"""A scripted module is one operator, and that is said.

Report: https://github.com/wandb/wandb/issues/580
Command: amanda run -t trace scripted_module.py
Right: any("cript" in note for note in trace.get("notes", []))
"""

import torch
from torch import nn

torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))(torch.ones(1, 4))
