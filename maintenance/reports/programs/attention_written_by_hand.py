"""FLOPs of attention that is written by hand.

Report: https://github.com/autoliuweijie/FastBERT/issues/14
Command: amanda run -t flops attention_written_by_hand.py
Right: flops["total"]["macs"] == 2 * 4 * 16 * 16 * 8
"""

import torch

query = key = value = torch.ones(1, 4, 16, 8)
scores = torch.matmul(query, key.transpose(-2, -1)) / 8**0.5
torch.matmul(scores.softmax(-1), value)
