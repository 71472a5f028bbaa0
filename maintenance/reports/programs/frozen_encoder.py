"""FLOPs of an encoder without gradients, which PyTorch runs as one operator.

Report: https://github.com/sovrasov/flops-counter.pytorch/issues/101
Command: amanda run -t flops frozen_encoder.py
Right: flops["total"]["macs"] == 4 * 16 * 32 * 32 + 2 * 16 * 16 * 32 + 2 * 16 * 32 * 64
"""

import torch
from torch import nn

layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
encoder = nn.TransformerEncoder(layer, 1).eval().requires_grad_(False)
encoder(torch.ones(1, 16, 32))
