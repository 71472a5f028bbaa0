"""Train a BERT that is narrow and so deep that it has 1,000 operators, for four steps."""

from __future__ import annotations

import torch
from transformers import BertConfig, BertForSequenceClassification

torch.manual_seed(0)
config = BertConfig(
    hidden_size=128, num_hidden_layers=40, num_attention_heads=4, intermediate_size=512
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
for _ in range(4):
    words, labels = torch.randint(0, config.vocab_size, (2, 64)), torch.randint(0, 2, (2,))
    optimizer.zero_grad()
    model(words, labels=labels).loss.backward()
    optimizer.step()
