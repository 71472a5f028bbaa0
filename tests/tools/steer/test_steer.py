"""`steer` on PyTorch, held to hooks on modules that are written by hand."""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward untyped.

from __future__ import annotations

import gc
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_models import MODELS, WIDTH, LanguageModel, edited_by_hooks, generate
from padded_tokens import IDS, LAST, PADDED, Tokens
from torch import nn

import amanda
from amanda_core.errors import SelectionError
from amanda_tools.steer import Steer

VECTOR = torch.randn(WIDTH, generator=torch.Generator().manual_seed(3))
UNIT = VECTOR / VECTOR.norm()


def _ablated(x: torch.Tensor, chosen: list[int]) -> torch.Tensor:
    x = x.clone()
    x[..., chosen] = 0
    return x


#: Name -> options of the tool, and the same by hand.
EDITS: dict[str, tuple[dict[str, Any], Callable[[torch.Tensor], torch.Tensor]]] = {
    "add": ({"vector": VECTOR, "factor": 0.5}, lambda x: x + 0.5 * VECTOR),
    "scale": ({"factor": 1.5}, lambda x: x * 1.5),
    "replace": ({"vector": VECTOR}, lambda x: VECTOR.expand_as(x)),
    "project": ({"vector": VECTOR}, lambda x: x - (x @ UNIT)[..., None] * UNIT),
    "ablate": ({"neurons": [0, 5]}, lambda x: _ablated(x, [0, 5])),
}
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "static cache": {"cache_implementation": "static"},
    "beam": {"num_beams": 3},
}


def prompt(rows: int = 2, length: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 59, (rows, length), generator=generator)


def check(language: LanguageModel, edit: Any, mode: str, tokens: int) -> None:
    options, by_hand = EDITS[edit]
    model, given = language.made(), prompt()
    wanted = {"output_logits": True, **MODES[mode]}
    with edited_by_hooks(model, language.layers, by_hand) as ran:
        expected = generate(model, given, tokens, **wanted)
    tool = Steer(edit, modules=list(language.layers), **options)
    with amanda.apply(tool):
        found = generate(model, given, tokens, **wanted)
    assert torch.equal(found.sequences, expected.sequences)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    result = tool.result()
    assert result.changed == len(ran) == len(language.layers) * tokens
    assert [(op.module, op.calls) for op in result.ops] == [(p, tokens) for p in language.layers]


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("language", MODELS, ids=str)
def test_steering_equals_hooks_written_by_hand(
    language: LanguageModel, edit: str, mode: str
) -> None:
    check(language, edit, mode, 8)


@pytest.mark.slow
@pytest.mark.parametrize("language", MODELS, ids=str)
def test_only_the_chosen_calls_are_steered(language: LanguageModel) -> None:
    model, given = language.made(), prompt()
    first = 2 * len(language.layers)
    edit = EDITS["add"][1]
    calls: list[int] = []

    def after_two_calls(x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return edit(x) if len(calls) > first else x

    with edited_by_hooks(model, language.layers, after_two_calls):
        expected = generate(model, given, 8, output_logits=True)
    tool = Steer("add", **EDITS["add"][0], modules=list(language.layers))
    with amanda.apply(tool.where(amanda.select(calls=slice(2, None)))):
        found = generate(model, given, 8, output_logits=True)
    for one, other in zip(found.logits, expected.logits, strict=True):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
    assert tool.result().changed == 6 * len(language.layers)


@pytest.mark.slow
@pytest.mark.one_interceptor
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("language", MODELS[1:3], ids=str)
def test_only_the_chosen_tokens_of_a_decoding_loop_are_steered(
    language: LanguageModel, mode: str
) -> None:
    model, given, first = language.made(), prompt(), 8
    width = 3 if mode == "beam" else 1
    seen = dict.fromkeys(language.layers, 0)
    paths = itertools.cycle(language.layers)

    def second_row_late(x: torch.Tensor) -> torch.Tensor:
        path = next(paths)
        late = torch.arange(seen[path], seen[path] + x.shape[1]) >= first
        seen[path] += x.shape[1]
        x = x.clone()
        x[width:, late] = x[width:, late] + 0.5 * VECTOR
        return x

    wanted = {"output_logits": True, **MODES[mode]}
    plain = generate(model, given, 16, **wanted)
    with edited_by_hooks(model, language.layers, second_row_late):
        expected = generate(model, given, 16, **wanted)
    rows = list(range(width, 2 * width))
    tool = Steer("add", **EDITS["add"][0], modules=list(language.layers), positions="8:", rows=rows)
    with amanda.apply(tool):
        found = generate(model, given, 16, **wanted)
    assert torch.equal(found.sequences, expected.sequences)
    for number, (one, other) in enumerate(zip(found.logits, expected.logits, strict=True)):
        assert torch.allclose(one, other, atol=1e-5, rtol=1e-5)
        # The other row, and what comes before, keep their bits. Experts compute with both rows.
        assert torch.equal(one[:width], other[:width])
        if given.shape[1] + number <= first:
            assert torch.equal(one, plain.logits[number])


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_an_assistant_does_not_change_what_is_steered() -> None:
    language = MODELS[1]
    model, assistant, given = language.made(), language.made(), prompt(rows=1)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.03 * torch.randn_like(assistant.lm_head.weight))
    options, by_hand = EDITS["add"]
    with edited_by_hooks(model, language.layers, by_hand):
        expected = generate(model, given, 32)
    with amanda.apply(Steer("add", modules=list(language.layers), **options)):
        found = generate(model, given, 32, assistant_model=assistant)
    assert torch.equal(found.sequences, expected.sequences)


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_nothing_grows_with_the_tokens() -> None:
    language = MODELS[0]
    counts: list[int] = []
    tool = Steer("add", modules=list(language.layers), **EDITS["add"][0], positions="3:")

    def count(tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if tokens.shape[1] in (5 + 32, 5 + 511):
            gc.collect()
            counts.append(len(gc.get_objects()))
        return scores

    with amanda.apply(tool):
        generate(language.made(), prompt(rows=1), 512, logits_processor=[count])
    assert tool.result().changed == 512 * len(language.layers)
    assert counts[1] - counts[0] < 100, counts


class Model(nn.Module):
    """Two layers, a function that is not a module, and heads."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)
        self.hidden: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        self.hidden.append(hidden.detach())
        result: torch.Tensor = self.second(hidden.reshape(-1, 4))
        return result.reshape(x.shape)


X = torch.arange(30.0).reshape(2, 5, 3) / 10


def steered(tool: Steer, x: torch.Tensor = X) -> tuple[torch.Tensor, torch.Tensor]:
    model = Model()
    with amanda.apply(tool), torch.no_grad():
        output = model(x)
    return model.hidden[0], output


@pytest.mark.parametrize(
    ("places", "chosen"),
    [
        ({"positions": [1, 3]}, (slice(None), [1, 3])),
        ({"positions": "-1"}, (slice(None), [4])),
        ({"rows": [1]}, ([1], slice(None))),
        ({"rows": "1", "positions": "2:"}, ([1], slice(2, None))),
    ],
)
def test_what_is_not_chosen_keeps_its_bits(places: dict[str, Any], chosen: Any) -> None:
    plain = steered(Steer("scale", ops=["nothing"]))[0]
    expected = plain.clone()
    expected[chosen] = expected[chosen] + torch.tensor([1.0, 2.0, 3.0, 4.0])
    tool = Steer("add", vector=[1, 2, 3, 4], ops=["tanh"], **places)
    found = steered(tool)[0]
    assert torch.equal(found.view(torch.int32), expected.view(torch.int32))
    (op,) = tool.result().ops
    assert (op.calls, op.changed, op.positions) == (1, 1, int((found != plain).sum()) // 4)


def test_positions_of_values_that_have_them_in_one_axis_with_the_rows() -> None:
    model = Model()
    hidden = torch.tanh(model.first(X))
    hidden[:, 2] = 0
    expected = model.second(hidden)
    tool = Steer("ablate", modules=["second"], value="inputs", positions=[2])
    assert torch.allclose(steered(tool)[1], expected, atol=1e-6)


def test_heads_are_equal_parts_of_the_last_axis() -> None:
    model = Model()
    hidden = torch.tanh(model.first(X))
    hidden[..., 2:] = 0
    tool = Steer("ablate", ops=["linear"], value="inputs", heads=[1], of_heads=2)
    tool.where(amanda.select(module="second"))
    assert torch.allclose(steered(tool)[1], model.second(hidden), atol=1e-6)
    wrong = Steer("ablate", ops=["tanh"], heads=[1], of_heads=3)
    with pytest.raises(SelectionError, match="of 4, does not hold 3 heads"):
        steered(wrong)
    with pytest.raises(SelectionError, match="of 4, has no neuron 9"):
        steered(Steer("ablate", ops=["tanh"], neurons=[9]))


def test_what_has_no_such_positions_is_refused() -> None:
    tool = Steer("scale", ops=["linear"], value="inputs", operand=1, positions=[0])
    with pytest.raises(SelectionError, match="Its positions cannot be chosen") as raised:
        steered(tool)
    assert "first/linear" in str(raised.value)
    with (
        amanda.apply(Steer("scale", ops=["tanh"], positions=[0])),
        pytest.raises(SelectionError, match="outside of any module"),
    ):
        torch.tanh(X)
    with pytest.raises(SelectionError, match="cannot be steered: it is not a tensor"):
        steered(Steer("scale", ops=["reshape"], value="inputs", operand=1))


def test_gradients_pass_as_if_nothing_had_changed() -> None:
    model, x = Model(), X.clone().requires_grad_()
    with amanda.apply(Steer("scale", factor=3.0, ops=["tanh"])):
        model(x).sum().backward()
    hidden = (torch.tanh(model.first(X)) * 3).detach().requires_grad_()
    model.second(hidden).sum().backward()
    reference = X.clone().requires_grad_()
    torch.tanh(model.first(reference)).backward(hidden.grad)
    assert reference.grad is not None
    assert x.grad is not None
    assert torch.allclose(x.grad, reference.grad)


@pytest.mark.parametrize(
    "options",
    [
        {"edit": "scale", "factor": 0.5, "ops": ["linear"]},
        {"edit": "scale", "factor": 0.5, "ops": ["linear"], "value": "inputs", "operand": 1},
        {"edit": "ablate", "ops": ["relu"], "neurons": [0, 3]},
        {"edit": "scale", "factor": 2.0, "ops": ["relu"], "heads": [1], "of_heads": 2},
        {"edit": "add", "ops": ["relu"], "vector": range(8)},
        {"edit": "project", "ops": ["relu"], "vector": range(8)},
    ],
)
def test_a_compiled_program_contains_the_change(options: dict[str, Any]) -> None:
    torch._dynamo.reset()
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(2, 3, 8)
    found = []
    tools = Steer(**options), Steer(**options)
    calls: list[Any] = [model, torch.compile(model, backend="aot_eager")]
    for tool, call in zip(tools, calls, strict=True):
        with amanda.apply(tool):
            y = call(x)
            found.append([y, *torch.autograd.grad(y.sum(), list(model.parameters()))])
    for one, other in zip(*found, strict=True):
        assert torch.allclose(one, other, atol=1e-6)
    eager, compiled = (tool.result() for tool in tools)
    assert eager.changed == len(eager.ops) == len(compiled.ops)
    assert compiled.changed == 0
    assert {op.calls for op in compiled.ops} == {op.changed for op in compiled.ops} == {None}
    assert [op.shape for op in compiled.ops] == [op.shape for op in eager.ops]
    assert "within compiled programs, in all calls" in compiled.title
    assert "0 values" not in compiled.title
    torch._dynamo.reset()


def test_vectors_come_from_files(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    vector = np.array([1, 2, 3, 4], np.float32)
    np.save(tmp_path / "a.npy", vector)
    save_file({"a": vector}, tmp_path / "a.safetensors")
    found = [
        steered(Steer("add", vector=given, ops=["tanh"]))[0]
        for given in (vector, vector.tolist(), tmp_path / "a.npy", str(tmp_path / "a.safetensors"))
    ]
    assert all(torch.equal(found[0], other) for other in found)
    save_file({"a": vector, "b": vector}, tmp_path / "b.safetensors")
    with pytest.raises(ValueError, match="must hold one tensor, but holds 2"):
        Steer("add", vector=tmp_path / "b.safetensors", ops=["tanh"])


def test_the_result_as_it_is_shown() -> None:
    tool = Steer("scale", factor=2.0, modules=["second", "third"])
    steered(tool)
    result = tool.result()
    title, *rows = str(result.table()).splitlines()
    assert title.startswith("scale: 1 value of 1 operator changed; changing took ")
    assert title.endswith("; modules='third' chose nothing that ran")
    assert rows[0].split() == ["op", "value", "first", "calls", "changed", "positions", "source"]
    assert rows[1].split()[:6] == [
        "second/module_output",
        "output",
        "float32[10,3]",
        "1",
        "1",
        "all",
    ]
    read = json.loads(result.to_json())
    assert (read["format"], read["ops"][0]["changed"]) == ("amanda.steer/1", 1)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"edit": "turn", "ops": ["a"]}, "edit must be of add, scale"),
        ({"edit": "scale"}, "choose something"),
        ({"edit": "add", "ops": ["a"]}, "add needs a vector"),
        ({"edit": "scale", "ops": ["a"], "vector": [1]}, "scale takes no vector"),
        ({"edit": "project", "ops": ["a"], "vector": [0.0]}, "must not be zero"),
        ({"edit": "add", "ops": ["a"], "vector": ["x"]}, "must be of finite numbers"),
        ({"edit": "add", "ops": ["a"], "vector": [1], "neurons": [0]}, "neurons are for scale"),
        ({"edit": "scale", "ops": ["a"], "heads": [0]}, "heads and of_heads go together"),
        ({"edit": "scale", "ops": ["a"], "heads": [2], "of_heads": 2}, "heads must be from 0"),
        ({"edit": "scale", "ops": ["a"], "value": "weights"}, "value must be outputs or inputs"),
        ({"edit": "scale", "ops": ["a"], "operand": -1}, "operand must not be negative"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Steer(**options)


def test_a_result_says_how_much_of_the_parameters_was_changed() -> None:
    model, x = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)), torch.ones(1, 3)
    tool = Steer("scale", factor=2.0, ops=["0/linear"], value="inputs", operand=1)
    with torch.no_grad(), amanda.apply(tool):
        found = model(x)
        next(model.parameters()).mul_(2)
    assert torch.equal(found, model(x))
    result = tool.result()
    assert (result.parameters, result.reached) == (12 + 8, 12)
    assert [vars(one) for one in result.unreached] == [
        {"name": "1.weight", "elements": 8, "reason": "not chosen"}
    ]
    assert "60.0% of the parameters reached" in result.title
    # Values that are not weights have no such figure.
    other = Steer("scale", factor=2.0, modules=["0"])
    with amanda.apply(other):
        model(x)
    assert "parameters" not in other.result().title


@pytest.mark.parametrize("axis", [None, 1])
def test_the_last_token_of_each_padded_row_is_steered(axis: Any) -> None:
    model, tool = Tokens(), Steer("ablate", modules=["embed"], positions="last", axis=axis)
    with amanda.apply(tool), torch.no_grad():
        found = model(input_ids=IDS, attention_mask=PADDED)
    inner = model.embed(IDS)
    for row, position in LAST.items():
        inner[row, position] = 0
    torch.testing.assert_close(found, model.out(inner))
    assert tool.result().ops[0].positions == len(LAST)


def test_the_last_token_is_not_guessed_without_the_name_of_the_mask() -> None:
    tool = Steer("ablate", modules=["embed"], positions="last")
    with amanda.apply(tool), torch.no_grad(), pytest.raises(SelectionError, match="attention_mask"):
        Tokens()(IDS, PADDED)
