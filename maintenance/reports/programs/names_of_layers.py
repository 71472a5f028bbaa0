"""The names of the layers of a model, by which their values are asked for.

Report: https://github.com/davidbau/baukit/issues/7
Command: amanda run -t summary names_of_layers.py
Right: [row["name"] for row in summary["modules"]][4:7] == ["0.linear1", "0.dropout", "0.linear2"]
"""

import torch
from torch import nn

model = nn.Sequential(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
model(torch.ones(1, 3, 8))
