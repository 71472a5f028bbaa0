"""FLOPs of packed sequences: those of their real steps.

Report: https://github.com/ultralytics/thop/pull/160
Command: amanda run -t flops packed_sequence.py
Right: flops["total"]["macs"] == (7 + 3 + 1) * 4 * 8 * (4 + 8)
"""

import torch
from torch import nn

sequences = [torch.ones(length, 4) for length in (7, 3, 1)]
nn.LSTM(4, 8)(nn.utils.rnn.pack_sequence(sequences))
