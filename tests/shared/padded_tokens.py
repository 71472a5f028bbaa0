"""A model of tokens, some of which are padding."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["IDS", "LAST", "PADDED", "Tokens"]


class Tokens(nn.Module):
    """A model of tokens that is given which of them are padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, input_ids: torch.Tensor, attention_mask: Any = None) -> torch.Tensor:
        """Return the outputs of all tokens."""
        result: torch.Tensor = self.out(self.embed(input_ids))
        return result


IDS = torch.arange(20).view(4, 5)
#: Padded on the right, not at all, everywhere, and on the left; and the last token of each row.
PADDED = torch.tensor([[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 1, 1, 1]])
LAST = {0: 2, 1: 4, 3: 4}
