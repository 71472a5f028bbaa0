"""The summary of modules on PyTorch, against its own modules, hooks and counter of FLOPs."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2LMHeadModel

import amanda
from amanda_tools.flops import Flops
from amanda_tools.summary import ModuleSummary, Summary, SummaryResult


def summary(model: Any, *args: Any, calls: int = 2, **options: Any) -> SummaryResult:
    tool = Summary(**options)
    with amanda.apply(tool):
        for _ in range(calls):
            model(*args)
    return tool.result()


def check(model: Any, *args: Any) -> dict[str, ModuleSummary]:
    """Compare all but output shapes with PyTorch; return the rows by module."""
    result, name = summary(model, *args), type(model).__name__
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        model(*args)
    counts = {path: sum(by.values()) // 2 for path, by in counter.get_flop_counts().items()}
    rows = {row.module: row for row in result.modules}
    modules = dict(model.named_modules())
    assert rows.keys() == modules.keys()
    for path, module in modules.items():
        assert rows[path].type == type(module).__name__
        if not isinstance(module, nn.ModuleList):  # The counter sees calls of modules.
            assert rows[path].macs == counts.get(f"{name}.{path}" if path else name, 0), path
    assert result.parameters == sum(p.numel() for p in model.parameters())
    assert result.macs == counts["Global"]
    assert result.not_counted == []
    return rows


class Residual(nn.Module):
    """Calls one convolution at two sizes, and holds a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.shared = nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.unused = nn.Linear(7, 7)
        self.head = nn.Linear(4, 5)

    def forward(self, images: torch.Tensor) -> Any:
        found = self.shared(self.pool(self.shared(self.stem(images))))
        return self.head(found.mean((2, 3)))


def test_modules_parameters_and_macs_are_those_of_pytorch() -> None:
    model = Residual()
    rows = check(model, torch.ones(2, 3, 10, 10))
    for path, module in model.named_modules():
        assert rows[path].parameters == sum(p.numel() for p in module.parameters())
    # The same convolution, on 8 times 8 and on 4 times 4 elements.
    assert rows["shared"].macs == 2 * (64 + 16) * 4 * 4 * 9
    assert rows["unused"].output is None
    assert (rows["unused"].parameters, rows["unused"].macs) == (56, 0)
    shapes: dict[str, list[int]] = {}

    def hook(path: str) -> Any:
        def note(module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
            shapes.setdefault(path, list(output.shape))

        return note

    for path, module in model.named_modules():
        module.register_forward_hook(hook(path))
    model(torch.ones(2, 3, 10, 10))
    assert {path: rows[path].output for path in shapes} == shapes


@pytest.mark.slow
def test_weights_that_modules_share_count_once() -> None:
    ids = torch.arange(8)[None]
    small: Any = GPT2Config(n_embd=32, n_layer=2, n_head=2, vocab_size=100)
    small._attn_implementation = "eager"
    gpt: Any = GPT2LMHeadModel(small)
    rows = check(gpt.eval(), ids)
    assert (rows["lm_head"].parameters, rows["transformer.wte"].parameters) == (0, 3200)
    assert rows["lm_head"].macs == 8 * 32 * 100
    # One layer that is called four times.
    shared: Any = AlbertConfig(
        hidden_size=32,
        embedding_size=16,
        num_hidden_layers=4,
        num_attention_heads=2,
        intermediate_size=64,
        vocab_size=100,
    )
    shared._attn_implementation = "eager"
    albert: Any = AlbertModel(shared)
    check(albert.eval(), ids)


@pytest.mark.parametrize("tool", [Summary, Flops])
def test_parameters_that_are_read_before_their_model_runs_count_once(tool: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.Linear(3, 2, bias=False))
    alone = nn.Parameter(torch.ones(2, 5))
    applied = tool()
    with amanda.apply(applied):
        norms = [parameter.norm() for parameter in [*model.parameters(), alone]]
        model(torch.ones(1, 4)) @ alone
    result = applied.result()
    found = result.parameters if tool is Summary else result.total.parameters
    assert (len(norms), found) == (3, 12 + 6 + 10)


def test_only_the_first_pass_of_a_training_counts() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2))
    optimizer = torch.optim.Adam(model.parameters())
    tool = Summary()
    with amanda.apply(tool):
        for size in (5, 3, 7):
            model(torch.ones(size, 4)).sum().backward()
            optimizer.step()
    result = tool.result()
    assert result.macs == 5 * (4 * 8 + 8 * 2)
    assert [row.output for row in result.modules] == [[5, 2], [5, 8], [5, 2]]
    assert result.parameters == 40 + 18


def test_two_models_and_what_is_outside_of_modules() -> None:
    first, second, weight = nn.Linear(4, 3), nn.Sequential(nn.Linear(3, 2)), torch.ones(2, 6)
    tool = Summary()
    with amanda.apply(tool):
        for _ in range(3):
            second(first(torch.ones(1, 4))) @ weight
    result = tool.result()
    rows = [(row.name, row.type, row.depth, row.macs) for row in result.modules]
    assert rows == [
        ("(program)", "", 0, 12),
        ("Linear", "Linear", 0, 12),
        ("Sequential", "Sequential", 0, 6),
        ("0", "Linear", 1, 6),
    ]
    assert (result.parameters, result.macs) == (15 + 8, 12 + 12 + 6)


def test_modules_that_get_their_parameters_in_the_first_call() -> None:
    model = nn.Sequential(nn.LazyLinear(8), nn.ReLU(), nn.LazyLinear(3))
    result = summary(model, torch.ones(2, 5))
    assert [row.parameters for row in result.modules] == [48 + 27, 48, 0, 27]
    assert [row.type for row in result.modules[1:]] == ["Linear", "ReLU", "Linear"]


def test_compiled_callables_are_summarized_and_stay_compiled() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    result = summary(torch.compile(model, backend="aot_eager"), torch.ones(2, 4), calls=3)
    assert (result.parameters, result.macs) == (30, 48)
    assert any("traced" in note for note in result.notes)


def test_what_has_no_formula_is_named() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            return torch.fft.fft(x).abs()

    result = summary(Spectrum(), torch.ones(2, 4))
    assert result.not_counted == ["fft: no formula for fft"]
    assert "NOT counted: fft" in result.table().title


def test_forms_of_output() -> None:
    result = summary(Residual(), torch.ones(2, 3, 10, 10))
    table = str(result.table())
    assert "\n    0     Conv2d" in table
    assert "[2, 4, 8, 8]" in table
    assert len(result.table(1).rows) == 6
    assert len(result.table(0).rows) == 9
    assert "Conv2d" in result._repr_html_()
    content = json.loads(result.to_json())
    assert content["format"] == "amanda.summary/1"
    assert [row["module"] for row in content["modules"][:3]] == ["", "stem", "stem.0"]
    empty = Summary().result()
    assert empty.table().title == "0 parameters; 0 MACs in one forward pass"
    json.loads(empty.to_json())


@pytest.mark.slow
def test_as_a_data_frame() -> None:
    pytest.importorskip("pandas", reason="pandas is not installed")
    assert len(summary(Residual(), torch.ones(2, 3, 10, 10)).to_dataframe()) == 9


def test_a_negative_depth_is_refused() -> None:
    with pytest.raises(ValueError, match="depth must not be negative"):
        Summary(depth=-1)
