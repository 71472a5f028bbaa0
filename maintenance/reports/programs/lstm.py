"""FLOPs of an LSTM: two for each MAC, in each step.

Report: https://github.com/deepspeedai/DeepSpeed/issues/3816
Command: amanda run -t flops lstm.py
Right: flops["total"]["flops"] == 2 * 100 * 4 * (64 * 64 + 64 * 64)
"""

import torch
from torch import nn

nn.LSTM(64, 64)(torch.ones(100, 1, 64))
