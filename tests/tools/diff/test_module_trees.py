"""`amanda diff` of what transformers' `model_addition_debugger_context` wrote."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.model_debugging_utils import model_addition_debugger_context

import amanda
from amanda_core.cli import main
from amanda_core.errors import ResultError
from amanda_tools.diff import compare
from amanda_tools.dump import Dump

pytestmark = pytest.mark.one_interceptor

TREE = "LlamaForCausalLM_debug_tree_FULL_TENSORS.json"


def model(change: Callable[[Any], object] = lambda model: None) -> Any:
    torch.manual_seed(0)
    sizes: Any = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2}
    heads: Any = {"num_attention_heads": 2, "num_key_value_heads": 2}
    made: Any = LlamaForCausalLM(LlamaConfig(vocab_size=17, **sizes, **heads))
    made.eval()
    with torch.no_grad():
        change(made)
    return made


def recorded(folder: Path, made: Any, text: bool = False) -> Path:
    folder.mkdir()
    how = {"debug_path": str(folder), "do_prune_layers": False, "use_repr": text}
    with torch.no_grad(), model_addition_debugger_context(made, **how):
        made(torch.arange(4)[None])
    return folder


def test_the_module_that_makes_the_difference_is_named(tmp_path: Path) -> None:
    def wrong(made: Any) -> None:
        made.model.layers[1].post_attention_layernorm.variance_epsilon = 1e-2

    a = recorded(tmp_path / "a", model())
    equal = compare(a, recorded(tmp_path / "equal", model()))
    assert (equal.same, equal.complete, equal.unread) == (True, True, [])
    found = compare(a, recorded(tmp_path / "b", model(wrong)))
    first = found.first
    assert first is not None
    assert (first.a.name, first.what) == ("model.layers.1.post_attention_layernorm", "output")
    assert first.inputs_agree
    kinds = {(one.a.name, one.what) for one in found.compared}
    assert ("model.layers.1.mlp.down_proj", "input") in kinds
    # What contains modules is judged by them.
    assert ("model.layers.1", "input") not in kinds
    largest = found.created[0]
    assert (largest.op.name, largest.is_beyond) == ("model.layers.1.post_attention_layernorm", True)


def test_what_is_not_a_module_shows_where_it_is_read(tmp_path: Path) -> None:
    def wrong(made: Any) -> None:
        made.model.layers[0].self_attn.scaling = 0.1

    a = recorded(tmp_path / "a", model())
    found = compare(a, recorded(tmp_path / "b", model(wrong)))
    assert found.first is not None
    assert (found.first.a.name, found.first.what) == ("model.layers.0.self_attn.o_proj", "input")
    assert not found.same


def test_a_dump_of_the_same_model(tmp_path: Path) -> None:
    made = model()
    a = recorded(tmp_path / "a", made)
    tool = Dump()
    with torch.no_grad(), amanda.apply(tool):
        made(torch.arange(4)[None])
    tool.result().write(tmp_path / "b")
    found = compare(a, tmp_path / "b")
    assert found.same, found.conclusion()
    names = {one.a.name for one in found.compared}
    assert {"model.layers.1.mlp.down_proj", "model.layers.0.self_attn.q_proj"} <= names
    assert "model.rotary_emb" not in names  # It returns a cosine and a sine.


def test_values_as_text_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = recorded(tmp_path / "a", model(), text=True)
    with pytest.raises(SystemExit) as caught:
        main(["diff", str(a), str(a)])
    assert caught.value.code == 2
    assert "use_repr=False prevents" in capsys.readouterr().err


def test_damaged_records_are_refused(tmp_path: Path) -> None:
    a = recorded(tmp_path / "a", model())
    b = recorded(tmp_path / "b", model())
    name = "LlamaForCausalLM.model.layers.0.mlp.down_proj_outputs.safetensors"
    (b / name).write_bytes((b / name).read_bytes()[:-4])
    found = compare(a, b)
    assert (found.same, found.complete) == (True, False)
    assert any("truncated" in one for one in found.unread)
    whole = (b / TREE).read_text()
    for cut in range(0, len(whole) - 1, len(whole) // 40):
        (b / TREE).write_text(whole[:cut])
        with pytest.raises(ResultError, match="not the record of one model_addition_debugger"):
            compare(a, b)
    malformed: list[Any] = [[], {"module_path": 3}, {"module_path": "a", "children": [1]}]
    for content in malformed:
        (b / TREE).write_text(json.dumps(content))
        with pytest.raises(ResultError):
            compare(a, b)
    (b / f"Other{TREE}").write_text(whole)
    with pytest.raises(ResultError, match="it has 2 of them"):
        compare(a, b)
