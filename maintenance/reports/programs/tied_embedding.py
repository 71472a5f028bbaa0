"""A weight that two layers share is one weight.

Report: https://github.com/TylerYep/torchinfo/issues/377
Command: amanda run -t prune:sparsity=0.5,embeddings=true tied_embedding.py
Right: prune["parameters"] == 100 * 8
"""

import torch
from torch import nn

embedding, head = nn.Embedding(100, 8), nn.Linear(8, 100, bias=False)
head.weight = embedding.weight
head(embedding(torch.arange(4)))
