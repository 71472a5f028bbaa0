"""`capture` on PyTorch: values of each token are those of one forward pass over the sequence."""

from __future__ import annotations

import gc
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from language_models import MODELS, LanguageModel, generate, seen_by_hooks
from padded_tokens import IDS, LAST, PADDED, Tokens
from torch import nn

import amanda
from amanda_core.errors import AmandaWarning, ResultError
from amanda_tools.capture import Capture, CaptureResult, load_capture
from amanda_tools.kit.sequences.places import Places, parse_numbers
from amanda_tools.kit.sequences.spans import Span

MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True},
    "static cache": {"cache_implementation": "static"},
    "beam": {"num_beams": 3},
    "no cache": {"use_cache": False},
}


def prompt(rows: int = 2, length: int = 5) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randint(1, 59, (rows, length), generator=generator)


def whole(language: LanguageModel, model: Any, given: torch.Tensor, found: torch.Tensor) -> Any:
    """Return the values that hooks see in one forward pass over the generated tokens."""
    with torch.no_grad(), seen_by_hooks(model, language.layers) as seen:
        if language.has_encoder:
            model(input_ids=given, decoder_input_ids=found)
        else:
            model(found)
    return seen


def check(language: LanguageModel, mode: str, tokens: int) -> None:
    model, given = language.made(), prompt()
    torch.manual_seed(2)
    plain = generate(model, given, tokens, **MODES[mode])
    tool = Capture(modules=list(language.layers))
    torch.manual_seed(2)
    with amanda.apply(tool):
        made = generate(model, given, tokens, **MODES[mode])
    assert torch.equal(made.sequences, plain.sequences)
    result = tool.result()
    assert not result.left_out
    along = made.beam_indices.tolist() if mode == "beam" else None
    seen = whole(language, model, given, made.sequences)
    start = 1 if language.has_encoder else given.shape[1]
    for path in language.layers:
        values = result.of(path)
        assert [value.call for value in values] == list(range(tokens))
        positions, array = result.sequence(path, along=along)
        assert positions == list(range(start + tokens - 1))
        assert np.abs(array - seen[path].numpy()[:, : len(positions)]).max() < 1e-5


def test_values_of_a_decoding_loop() -> None:
    check(MODELS[1], "greedy", 4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("language", MODELS, ids=str)
def test_values_of_each_token_are_those_of_one_forward_pass(
    language: LanguageModel, mode: str
) -> None:
    check(language, mode, 32)


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_rejected_drafts_of_an_assistant_are_replaced() -> None:
    language = MODELS[1]
    model, assistant, given = language.made(), language.made(), prompt(rows=1)
    with torch.no_grad():
        assistant.lm_head.weight.add_(0.03 * torch.randn_like(assistant.lm_head.weight))
    tool = Capture(modules=list(language.layers))
    with amanda.apply(tool):
        made = generate(model, given, 32, assistant_model=assistant)
    assert torch.equal(made.sequences, generate(model, given, 32).sequences)
    result, seen = tool.result(), whole(language, model, given, made.sequences)
    models = {value.outermost for value in result.values}
    assert models == {"LlamaForCausalLM", "LlamaForCausalLM#2"}
    with pytest.raises(ResultError, match="was captured in calls of"):
        result.sequence(language.layers[0])
    # The assistant is called more often.
    outermost = min(models, key=lambda name: [v.outermost for v in result.values].count(name))
    assert [v.outermost for v in result.values].count(outermost) < 2 * 32
    for path in language.layers:
        array = result.sequence(path, outermost=outermost).array
        # What the model computed after its last token is a draft.
        length = min(array.shape[1], given.shape[1] + 31)
        assert length > given.shape[1] + 24
        assert np.abs(array[:, :length] - seen[path].numpy()[:, :length]).max() < 1e-5


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_positions_count_the_padding() -> None:
    language = MODELS[1]
    model, given = language.made(), prompt()
    mask = torch.ones_like(given)
    mask[1, :2] = 0
    tool = Capture(modules=[language.layers[0]], rows=[1], positions="2:")
    with amanda.apply(tool):
        made = generate(model, given, 4, attention_mask=mask)
    positions, array = tool.result().sequence(language.layers[0])
    assert positions == list(range(2, 8))
    with torch.no_grad(), seen_by_hooks(model, language.layers) as seen:
        model(made.sequences[1:, 2:])
    assert np.abs(array - seen[language.layers[0]].numpy()[:, :6]).max() < 1e-5


# What is chosen.


class Model(nn.Module):
    """Two layers, and a function that is not a module."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(3, 4), nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        flat: torch.Tensor = self.second(hidden.reshape(-1, 4))
        return flat.reshape(x.shape)


def captured(*values: torch.Tensor, **options: Any) -> CaptureResult:
    tool = Capture(**options)
    model = Model()
    with amanda.apply(tool), torch.no_grad():
        for value in values:
            model(value)
    return tool.result()


X = torch.arange(30.0).reshape(2, 5, 3) / 10


def test_operators_positions_and_rows_are_chosen() -> None:
    result = captured(X, X, ops=["tanh"], positions=[1, 3, -1], rows="1")
    expected = torch.tanh(Model().first(X)).detach().numpy()[1:, [1, 3, 4]]
    assert [(v.call, v.rows, v.positions) for v in result.values] == [
        (0, [1], [1, 3, 4]),
        (1, [1], [1, 3, 4]),
    ]
    assert np.array_equal(result.read(result.values[0]), expected)
    assert np.array_equal(result.sequence("tanh").array, expected)


def test_rows_and_positions_in_one_axis_are_told_apart() -> None:
    result = captured(X, modules=["second"], values=["inputs", "outputs"], positions="2:4")
    model = Model()
    hidden = torch.tanh(model.first(X))
    for what, expected in (("input", hidden), ("output", model.second(hidden))):
        (value,) = result.of("second", what)
        assert (value.rows, value.positions) == ([0, 1], [2, 3])
        assert np.allclose(result.read(value), expected.detach().numpy()[:, 2:4], atol=1e-6)


def test_calls_are_chosen_and_others_are_not_instrumented() -> None:
    tool = Capture(ops=["tanh"]).where(amanda.select(calls=[1]))
    model, taken = Model(), []
    tool.take = lambda *values, **rest: taken.append(values)  # type: ignore[method-assign]
    with amanda.apply(tool), torch.no_grad():
        for _ in range(3):
            model(X)
    assert len(taken) == 1


def test_parameters_are_captured_on_request() -> None:
    result = captured(X, ops=["linear"], values=["inputs"])
    assert {value.position for value in result.values} == {"0"}
    result = captured(X, ops=["linear"], values=["inputs"], operands=[1])
    assert np.array_equal(result.read(result.values[0]), Model().first.weight.detach().numpy())


def test_what_has_no_such_positions_is_left_out_and_said() -> None:
    result = captured(X, ops=["linear", "conv*"], values=["inputs"], operands=[2], positions=[0])
    assert not result.values
    assert result.left_out[0].reason == (
        "positions cannot be chosen: its shape [4] has not 2 rows on axis 0 and 5 positions on "
        "axis 1"
    )
    assert "ops='conv*' chose nothing that ran" in result.notes
    tool = Capture(ops=["tanh"], positions=[0])
    with amanda.apply(tool):
        torch.tanh(X)
    (left,) = tool.result().left_out
    assert "outside of any module" in left.reason


def test_memory_is_bounded() -> None:
    size = X.numel() * 4
    result = captured(X, X, X, modules=["*second"], max_memory=2 * size)
    assert [value.call for value in result.values] == [0, 1]
    (left,) = result.left_out
    assert (left.tensors, left.bytes) == (1, size)


def test_files_are_written_as_values_come_and_read_again(tmp_path: Path) -> None:
    folder = tmp_path / "here"
    result = captured(X, X, X, modules=["second"], form="safetensors", folder=folder, max_memory=8)
    assert len(list(folder.glob("*.safetensors"))) == 3
    in_memory = captured(X, X, X, modules=["second"])
    for written, where in ((result, tmp_path / "one"), (in_memory, tmp_path / "two" / "capture")):
        files = written.write(where)
        assert all(file.is_file() for file in files)
        read = load_capture(where if where.name == "one" else where.parent)
        assert np.array_equal(read.sequence("second").array, in_memory.sequence("second").array)
    index = json.loads((tmp_path / "one" / "index.json").read_text())
    assert index["format"] == "amanda.capture/1"
    index["values"][0]["file"] = "../00000.safetensors"
    (tmp_path / "one" / "index.json").write_text(json.dumps(index))
    with pytest.raises(ResultError, match="is not the name of a file of values"):
        load_capture(tmp_path / "one")


def test_the_result_as_it_is_shown() -> None:
    table = captured(X, modules=["second"], positions="-2:").table()
    assert table.title.startswith("1 value of 1 operator; capturing took ")
    assert [line.split() for line in str(table).splitlines()[1:]] == [
        ["op", "value", "first", "times", "positions"],
        ["second/module_output", "output", "0", "float32[2,2,3]", "1", "4"],
    ]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({}, "choose something"),
        ({"ops": ["a"], "values": ["weights"]}, "values must be of inputs, outputs"),
        ({"ops": ["a"], "positions": "x"}, "positions must be a number"),
        ({"ops": ["a"], "rows": [True]}, "rows must be a number"),
        ({"ops": ["a"], "axis": 0}, "axis must be at least 1"),
        ({"ops": ["a"], "form": "npz"}, "form must be memory or safetensors"),
        ({"ops": ["a"], "max_memory": 0}, "max_memory must be positive"),
        ({"ops": ["a"], "folder": Path("x")}, "folder is for form='safetensors'"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Capture(**options)


@pytest.mark.parametrize("text", ["3", "-1", "2:4", "-3:", ":", "::2", "1:-1", ":2"])
def test_choices_are_those_of_python(text: str) -> None:
    numbers = list(range(7))
    expected = eval(f"numbers[{text}]", {"numbers": numbers})
    expected = expected if isinstance(expected, list) else [expected]
    span = Span("Model", 0, 1, 0, 7)
    assert Places(text).chosen_in(span)[1] == expected
    # In a later call: the same absolute positions, and what is negative counts from its end.
    late = Places(text).chosen_in(Span("Model", 1, 1, 7, 1))[1]
    assert late == ([0] if text in ("-1", "-3:", ":") else [])


def test_a_choice_of_nothing_is_all() -> None:
    assert parse_numbers(None, "rows") is None
    assert Places().are_all


@pytest.mark.slow
@pytest.mark.one_interceptor
def test_nothing_grows_with_the_tokens_that_are_not_chosen() -> None:
    language = MODELS[0]
    model, given = language.made(), prompt(rows=1)
    library = importlib.import_module("transformers")
    counts: dict[int, int] = {}

    class Counting(library.LogitsProcessor):  # type: ignore[misc, name-defined]
        def __call__(self, tokens: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            made = tokens.shape[1] - given.shape[1]
            if made in (32, 511):
                gc.collect()
                counts[made] = len(gc.get_objects())
            return scores

    tool = Capture(modules=list(language.layers), positions=":16")
    with amanda.apply(tool):
        generate(model, given, 512, logits_processor=library.LogitsProcessorList([Counting()]))
    assert len(tool.result().values) == 2 * (16 - given.shape[1] + 1)
    assert counts[511] - counts[32] < 100, counts


@pytest.mark.parametrize(("rows", "chosen"), [(None, LAST), ([1, 0], {0: 2, 1: 4}), ("2:", {3: 4})])
def test_the_last_token_of_each_padded_row_is_captured(rows: Any, chosen: dict[int, int]) -> None:
    model, tool = Tokens(), Capture(modules=["embed"], positions="last", rows=rows)
    with amanda.apply(tool), torch.no_grad():
        model(input_ids=IDS, attention_mask=PADDED)
    (value,) = tool.result().values
    assert dict(zip(value.rows or (), value.last or (), strict=True)) == chosen
    expected = [model.embed(IDS[row, position]).tolist() for row, position in chosen.items()]
    assert tool.result().read(value).tolist() == expected
    assert value.positions is None
    assert tool.result().table().rows[0][4] == len(chosen)


def test_without_a_mask_the_last_token_of_each_row_is_that_of_the_call() -> None:
    model, tool = Tokens(), Capture(modules=["embed"], positions="last")
    with amanda.apply(tool), torch.no_grad():
        model(input_ids=IDS)
    assert tool.result().values[0].last == [4, 4, 4, 4]


def test_a_mask_without_a_name_is_not_guessed() -> None:
    model, tool = Tokens(), Capture(modules=["embed"], positions="last")
    with amanda.apply(tool), torch.no_grad():
        model(IDS, PADDED)
    assert tool.result().values == []
    assert "not given by the name attention_mask" in str(tool.result().left_out)


class Forwards(nn.Module):
    """Calls the `forward` of a part, and holds one that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.part, self.unused = Model(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.part.forward(x).exp()


@pytest.mark.parametrize("directly", [False, True])
def test_a_module_whose_forward_is_called_is_captured(directly: bool) -> None:
    torch.manual_seed(0)
    net, tool = Forwards(), Capture(modules=["part", "part.first", "unused", "no.such"])
    with amanda.apply(tool), torch.no_grad():
        out = net.forward(X) if directly else net(X)
    result = tool.result()
    names = [op.name.partition("/")[0] for op in result.ops]
    found = {names[value.op]: result.read(value) for value in result.values}
    with torch.no_grad():
        assert np.array_equal(found["part"], net.part(X).numpy())
        assert np.array_equal(found["part.first"], net.part.first(X).numpy())
        assert torch.equal(out, net(X))
    notes = {note.partition("'")[2].partition("'")[0]: note for note in result.notes}
    assert notes["no.such"] == "modules='no.such' chose nothing that ran"
    if not directly:
        assert notes["unused"].endswith(
            "unused is in the model, but was not called: no operator ran in it, and none read a "
            "parameter of it"
        )


class Reader(nn.Module):
    """Computes with the weight of a part that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.part.weight)


class ByMap(nn.Module):
    """Lets C++ code call the `forward` of its part, through a function of another name."""

    def __init__(self) -> None:
        super().__init__()
        self.part = nn.Linear(3, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (out,) = map(type(self.part).forward, [self.part], [x])
        return out


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(3, 1, 8, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        return self.layer(x)


@pytest.mark.filterwarnings("ignore:The fused inference path")
@pytest.mark.parametrize(
    ("net", "module", "why"),
    [
        (Reader, "part", "linear reads its parameters and computes what it would"),
        (
            lambda: nn.Sequential(torch.jit.script(Model())),
            "0.first",
            "0/forward (TorchScript) computes what it would",
        ),
        (
            Encoder,
            "layer.self_attn.out_proj",
            "layer.self_attn/linear#2 reads its parameters and computes",
        ),
        (Forwards, "unused", "no operator ran in it"),
    ],
)
def test_why_a_module_is_not_called(net: Callable[[], nn.Module], module: str, why: str) -> None:
    tool = Capture(modules=[module])
    with amanda.apply(tool), torch.no_grad():
        net().eval()(X)
    (note,) = [note for note in tool.result().notes if "chose nothing" in note]
    assert note.startswith(f"modules='{module}' chose nothing that ran: {module} is in the model, ")
    assert why in note


def test_the_forward_of_a_module_is_called_by_code_in_c() -> None:
    tool = Capture(modules=["part"])
    with amanda.apply(tool), torch.no_grad():
        with pytest.warns(AmandaWarning, match="The forward of Linear was called"):
            ByMap()(X)
        assert "part is in the model, but was not called: its `forward` was" in str(
            tool.result().notes
        )
        ByMap()(X)
