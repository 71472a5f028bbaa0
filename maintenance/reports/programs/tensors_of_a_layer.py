"""How many values a layer computes.

Report: https://github.com/johnmarktaylor91/torchlens/issues/37
Command: amanda run -t trace tensors_of_a_layer.py
Right: [len(op["outputs"]) for op in trace["ops"] if op["type"] == "linear"] == [1]
"""

import torch
from torch import nn

nn.Linear(4, 4)(torch.ones(1, 4))
