"""MACs of a GRU, in each of its 100 steps.

Report: https://github.com/ThanatosShinji/onnx-tool/issues/64
Command: amanda run -t flops gru.py
Right: flops["total"]["macs"] == 100 * 3 * (64 * 64 + 64 * 64)
"""

import torch
from torch import nn

nn.GRU(64, 64)(torch.ones(100, 1, 64))
