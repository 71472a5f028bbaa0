"""FLOPs of attention grow with the square of the sequence.

Report: https://github.com/MrYxJ/calculate-flops.pytorch/issues/48
Command: amanda run -t flops attention_is_quadratic.py
Right: flops["total"]["macs"] == 2 * 8 * (16**2 + 32**2)
"""

import torch
from torch.nn import functional

for length in (16, 32):
    query = torch.ones(1, 1, length, 8)
    functional.scaled_dot_product_attention(query, query, query)
