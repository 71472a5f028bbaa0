"""Train a ResNet-50 of random weights for four steps."""

from __future__ import annotations

import torch
from transformers import ResNetConfig, ResNetForImageClassification

torch.manual_seed(0)
model = ResNetForImageClassification(ResNetConfig())
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for _ in range(4):
    images, labels = torch.randn(2, 3, 160, 160), torch.randint(0, 2, (2,))
    optimizer.zero_grad()
    model(images, labels=labels).loss.backward()
    optimizer.step()
