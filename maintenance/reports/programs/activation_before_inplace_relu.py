"""A captured value is that of the layer, also if the next one writes over it.

Report: https://github.com/meta-pytorch/captum/issues/156
Command: amanda run -t capture:modules=0 activation_before_inplace_relu.py
Right: min(float(value.min()) for value in values("capture")) < 0
"""

import torch
from torch import nn

torch.manual_seed(23)
model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(inplace=True))
model(torch.randn(1, 3, 5, 5))
