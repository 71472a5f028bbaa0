"""Each operator of a network in order, without end.

Report: https://github.com/johnmarktaylor91/torchlens/issues/39
Command: amanda run -t trace operators_of_a_network.py
Right: [trace["ops"][index]["type"] for index in trace["sequence"]][1:] == ["linear", "relu", "linear"]
"""

import torch
from torch import nn

nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))(torch.ones(1, 4))
