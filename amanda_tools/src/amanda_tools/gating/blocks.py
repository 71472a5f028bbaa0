"""`PruneAttention`: blocks of tokens that later layers do not need (Block-skim, AAAI 2022)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from amanda_core import OpContext
from amanda_core.engine.activation import autodiff_enabled
from amanda_core.errors import ToolError
from amanda_tools.gating.gates import Gating

__all__ = ["PruneAttention"]


class PruneAttention(Gating):
    """Skips blocks of tokens of an encoder, layer by layer.

    Of each layer a gate looks at the attention within each block, all heads as channels, and says
    how probably the block is needed. Later layers compute only the blocks that are, and a skipped
    token keeps its state. In training nothing is skipped: train the gates by `loss`.

    The first call is dense. It shows the layers: each attention, and the last `layer_norm` before
    the next one, whose output all that follows reads.

    Args:
        threshold: The probability from which a block is kept.
        block: How many tokens a block has. The length must be a multiple of it.
        per_sample: Whether each sample keeps its own blocks only. Otherwise all samples keep as
            many as the one that keeps most, as the authors do, and results depend on the batch.
        layers: See `Gating`; likewise `seed` and `state`. All layers of an encoder must match.

    Raises:
        ValueError: An option is not in its range.

    >>> tool = PruneAttention(threshold=0.5, per_sample=True)
    """

    name = "prune_attention"
    saved = ("block",)
    works_on = ("pytorch/*/eager",)

    def __init__(
        self,
        threshold: float = 0.5,
        block: int = 32,
        per_sample: bool = False,
        layers: Sequence[str] = ("*",),
        seed: int = 0,
        state: str | None = None,
    ) -> None:
        if not 0 <= threshold <= 1 or block < 4 or block % 4:
            raise ValueError("threshold is from 0 to 1, and block a positive multiple of 4")
        self.threshold, self.block, self.per_sample = threshold, block, per_sample
        #: Op id of an attention -> its gate, and the normalizations that follow it.
        self._attentions: dict[int, tuple[str, list[int]]] = {}
        #: Op id of the normalization at the end of a layer -> whether this is the last one.
        self._ends: dict[int, bool] = {}
        self._begin()
        super().__init__(layers, seed, state)
        self.add_inst_for_call(begin=lambda call: self._begin())

    def _begin(self) -> None:
        #: Of this call: the state of all tokens; of those that are computed the indices, and if
        #: they belong to their sample; and the same of those that the next layer computes.
        self._full, self._left, self._next = None, None, None  # type: Any, Any, Any
        if self._attentions and not self._ends:
            count = min(len(norms) for _, norms in self._attentions.values())
            ends = [norms[count - 1] for _, norms in self._attentions.values() if count]
            self._ends = {end: end == ends[-1] for end in ends}
            self.invalidate()

    def analyse(self, context: OpContext) -> None:
        """Note an attention or normalization in the first call, and replace it afterwards."""
        if not self.meets(context):
            return
        op_id, kind, inputs = context.get_op_id(), context["type"], context.get_inputs()
        plain = kind == "attention" and not inputs[5] and not inputs[7]  # Not of a decoder.
        with autodiff_enabled():
            if op_id in self._ends:
                context.insert_after_op(self.shorten, last=self._ends[op_id])
            elif self._ends and op_id in self._attentions:
                name = self._attentions[op_id][0]
                self.add_gate(name, lambda: _gate(inputs[0].shape[1], self.block), inputs[0])
                self.add_row(context, name)
                context.replace_op(self.attend, key=name)
            elif not self._ends and kind == "layer_norm" and self._attentions:
                [*self._attentions.values()][-1][1].append(op_id)
            elif not self._ends and plain and self.chosen(context):
                self._attentions[op_id] = f"{context.name}#{len(self._attentions)}", []

    def attend(self, *inputs: Any, key: str) -> Any:
        """Return the attention of the tokens that are left, and decide which blocks are needed."""
        import torch

        query, keys, values, mask, dropout, _, scale, _ = inputs
        scores = query @ keys.transpose(-2, -1)
        scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
        if mask is not None and self._left is not None:
            index, size = self._left[0], mask.shape[-1]
            samples = torch.arange(len(index)).to(index)[:, None, None]
            mask = mask.expand(len(index), -1, size, size)
            mask = mask[samples, :, index[..., None], index[:, None]].permute(0, 3, 1, 2)
        if mask is not None and mask.dtype == torch.bool:
            scores = scores.masked_fill(~mask, -math.inf)
        elif mask is not None:
            scores = scores + mask
        if self._left is not None:
            scores = scores.masked_fill(~self._left[1][:, None, None], -math.inf)
        attention = scores.softmax(-1)
        self._next = self._needed(attention, key)
        return torch.dropout(attention, dropout, dropout > 0) @ values

    def _needed(self, attention: Any, key: str) -> tuple[Any, Any] | None:
        """Return the places of the tokens that are needed, and if they belong to their sample."""
        import torch

        size, (batch, heads, length, _) = self.block, attention.shape
        if length % size:
            why, fix = f"{length} tokens are not a multiple of {size}", "Pad them to one"
            raise ToolError(why, where=key, fix=f"{fix}, as by pad_to_multiple_of of a tokenizer")
        tiles = attention.unflatten(3, (-1, size)).unflatten(2, (-1, size)).diagonal(0, 2, 4)
        tiles = tiles.permute(0, 4, 1, 2, 3).reshape(-1, heads, size, size)
        training = self.is_training()
        self.terms[key] = logits = self.gates[key].train(training)(tiles).unflatten(0, (batch, -1))
        if training:
            return None
        own = attention.new_ones(batch, length).bool() if self._left is None else self._left[1]
        needed = logits.softmax(-1)[..., 1].masked_fill(~own[:, ::size], -1.0)
        counts = (needed >= self.threshold).sum(1).clamp(min=1)
        self.count(key, counts.sum(), needed.numel())
        blocks, order = needed.topk(int(counts.max()), 1).indices.sort(1)
        mine = (order < counts[:, None]) | (not self.per_sample)
        places = (blocks[..., None] * size + torch.arange(size).to(blocks)).flatten(1)
        return places, mine.repeat_interleave(size, 1) & own.gather(1, places)

    def shorten(self, state: Any, last: bool) -> Any:
        """Return the state of the tokens that the next layer computes; after the last one, all."""
        full = state
        if self._left is not None:
            index, own = self._left[0][..., None].expand_as(state), self._left[1][..., None]
            full = self._full.scatter(1, index, state.where(own, self._full.gather(1, index)))
        self._full = full
        if last or self._next is None:
            return full if last else None
        places, own = self._next
        self._left = places if self._left is None else self._left[0].gather(1, places), own
        return state.gather(1, places[..., None].expand(-1, -1, state.shape[-1]))

    def loss(self, answer: Any, balance: float = 1.0, least: int = 1) -> Any:
        """Return the sum over the layers of the cross entropy of what the gates say.

        Args:
            answer: Which tokens belong to an answer, of shape (samples, tokens).
            balance: The weight of blocks with an answer.
            least: How many such tokens they have; 2 in the authors' code.
        """
        import torch

        label = (answer.unflatten(1, (-1, self.block)).sum(-1) >= least).long().flatten()
        weights = torch.tensor([1.0, balance]).to(answer.device)
        loss = torch.nn.functional.cross_entropy
        return sum(loss(one.flatten(0, 1), label, weights) for one in self.terms.values())


def _gate(heads: int, block: int) -> Any:
    from torch import nn

    layers: list[Any] = []
    for _ in range(2):
        layers += [nn.Conv2d(heads, heads, 3, padding=1), nn.BatchNorm2d(heads), nn.ReLU()]
        layers.append(nn.AvgPool2d(2))
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(heads * block * block // 16, 2))
