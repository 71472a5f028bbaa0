"""Rewriting on PyTorch: results and gradients are those of the program itself.

Long, since it is a list of cases.
"""

# mypy: allow-untyped-calls
# torch leaves Tensor.backward and its like untyped.

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.fusion import fuse_conv_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertModel, GPT2Config, GPT2Model, ViTConfig, ViTModel

import amanda
from amanda_core.results import HasResult, Result
from amanda_tools.rewriting import Input, Matched, Operator, Rewrite, RewriteResult, Rewritten, Rule


class Counting(TorchDispatchMode):
    """Counts what PyTorch executes, below everything that Amanda sees."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        self.counts[name] = self.counts.get(name, 0) + 1
        return func(*args, **(kwargs or {}))


class Pair(nn.Module):
    """A convolution and a normalisation with statistics and weights of their own."""

    def __init__(self, rank: int = 2, bias: bool = True, affine: bool = True) -> None:
        super().__init__()
        self.conv = getattr(nn, f"Conv{rank}d")(4, 6, 3, padding=1, groups=2, bias=bias)
        self.norm = getattr(nn, f"BatchNorm{rank}d")(6, affine=affine)
        self.norm.running_mean.normal_()
        self.norm.running_var.uniform_(0.5, 2)
        for parameter in self.norm.parameters():
            nn.init.normal_(parameter)
        self.way = "norm"

    def forward(self, x: torch.Tensor) -> Any:
        value = self.conv(x)
        if self.way == "beside":
            return self.norm(value) + value
        if self.way == "instead":
            return value.tanh()
        if self.way == "neither":
            return value
        if self.way == "both":
            return self.norm(value), value
        return self.norm(value).relu()


def gradients(model: nn.Module, output: Any, *more: torch.Tensor) -> list[torch.Tensor]:
    outputs = output if isinstance(output, tuple) else (output,)
    total: Any = sum(value.square().sum() for value in outputs)
    wanted = [*model.parameters(), *more]
    found = torch.autograd.grad(total, wanted, allow_unused=True)
    return [torch.zeros(()) if gradient is None else gradient for gradient in found]


def assert_close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)


def traced(tool: Rewrite, model: nn.Module, x: torch.Tensor) -> None:
    """Run once to trace and once rewritten, with inner values skipped."""
    model(x)
    model(x)


@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_folding_is_fuse_conv_bn_eval_s(rank: int, bias: bool, affine: bool) -> None:
    model = Pair(rank, bias, affine).eval()
    x = torch.randn(2, 4, *[5] * rank, requires_grad=True)
    fused = fuse_conv_bn_eval(model.conv, model.norm)
    expected = gradients(model, model(x), x)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for _ in range(3):
            output = model(x)
            torch.testing.assert_close(output, fused(x).relu(), rtol=1e-5, atol=1e-5)
            for found, value in zip(gradients(model, output, x), expected, strict=True):
                assert_close(found, value)
    (match,) = tool.result().matches
    # The first run is traced.
    assert (match.refused, match.rewritten, match.fallbacks) == (None, 2, {})
    assert match.ops == ["conv/conv" + f"{rank}d", "norm/batch_norm"]


@pytest.mark.parametrize(("interior", "convolutions"), [("skip", 1), ("run", 2)])
def test_what_is_skipped_is_not_computed(interior: Any, convolutions: int) -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    tool = Rewrite(rules=["conv_bn"], interior=interior)
    with amanda.apply(tool), torch.no_grad():
        traced(tool, model, x)
        with Counting() as counting:
            model(x)
    assert counting.counts["convolution"] == convolutions
    assert "native_batch_norm" not in counting.counts
    assert "_native_batch_norm_legit_no_training" not in counting.counts
    assert "cudnn_batch_norm" not in counting.counts


def test_a_value_that_is_used_elsewhere() -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    model.way = "beside"
    expected = model(x)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for _ in range(3):
            assert torch.equal(model(x), expected)
    (match,) = tool.result().matches
    assert match.refused == "the value of conv/conv2d is used by add, too"
    assert match.rewritten == 0


@pytest.mark.parametrize("way", ["beside", "instead", "neither", "both"])
def test_a_run_that_takes_another_way(way: str) -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5, requires_grad=True)
    plain = model(x)
    model.way = way
    other = model(x)
    expected = gradients(model, other, x)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        model.way = "norm"
        traced(tool, model, x)
        model.way = way
        for _ in range(3):
            output = model(x)
            assert_close(output, other)
            for found, value in zip(gradients(model, output, x), expected, strict=True):
                assert_close(found, value)
        model.way = "norm"
        assert_close(model(x), plain)
    (match,) = tool.result().matches
    used = {"beside": "add", "instead": "tanh"}.get(way)
    if used is not None:
        reason = f"the value of conv/conv2d is used by {used}, too"
        assert match.fallbacks[reason] >= 1
        assert match.refused == reason
    else:
        assert match.kept >= 1


def test_other_shapes() -> None:
    model = Pair().eval()
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for size in (2, 2, 5, 5, 3, 2):
            x = torch.randn(size, 4, 5, 6)
            with amanda.disabled():
                expected = model(x)
            assert_close(model(x), expected)
    assert tool.result().matches[0].rewritten == 5


@pytest.mark.parametrize("extent", [torch.no_grad, torch.inference_mode])
def test_without_gradients(extent: Callable[[], Any]) -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    tool = Rewrite(rules=["conv_bn"])
    with extent():
        expected = model(x)
        with amanda.apply(tool):
            for _ in range(3):
                assert_close(model(x), expected)
    assert tool.result().rewritten == 2


def test_a_guard_that_refuses() -> None:
    torch.manual_seed(1)
    model, reference = Pair(), Pair()
    reference.load_state_dict(model.state_dict())
    x = torch.randn(2, 4, 5, 5)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for _ in range(3):
            assert torch.equal(model(x), reference(x))
    assert torch.equal(model.norm.running_mean, reference.norm.running_mean)
    (match,) = tool.result().matches
    assert match.fallbacks == {"the normalisation is in training": 2}
    assert match.rewritten == 0
    assert tool.result().reasons == match.fallbacks
    assert "not rewritten: 2 as the normalisation is in training" in tool.result().table().title


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpoints_run_again_what_has_run(reentrant: bool) -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = Pair(), Pair()
            self.between = nn.Conv2d(6, 4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            inside = checkpoint(self.inside, x, use_reentrant=reentrant)
            return self.outside(self.between(inside))

    model, x = Checkpointed().eval(), torch.randn(2, 4, 5, 5, requires_grad=True)

    def gradient() -> Any:
        x.grad = None
        total: Any = model(x).sum()
        total.backward()
        return x.grad

    expected = gradient()
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for _ in range(4):
            assert_close(gradient(), expected)
    inside, outside = tool.result().matches
    assert inside.refused == "a checkpoint runs it again"
    assert (inside.rewritten, outside.rewritten, outside.refused) == (0, 3, None)


def test_a_selection_of_operators() -> None:
    model = nn.Sequential(Pair(), nn.Conv2d(6, 4, 1), Pair()).eval()
    x = torch.randn(2, 4, 5, 5)
    expected = model(x)
    tool = Rewrite(rules=["conv_bn"]).where(amanda.select(module="2*"))
    with amanda.apply(tool):
        for _ in range(3):
            assert_close(model(x), expected)
    assert [(match.name, match.rewritten) for match in tool.result().matches] == [
        ("0.norm/batch_norm", 0),
        ("2.norm/batch_norm", 2),
    ]


def test_what_works_in_place_is_refused() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True))
    rule = Rule(
        "relu",
        Operator(("relu",), {0: Operator(("conv2d",), {0: Input("x")}, "conv")}, "relu"),
        lambda match: match.ops["conv"].run(match.ops["conv"].inputs).clamp(min=0),
    )
    tool = Rewrite()
    tool.add(rule)
    x = torch.randn(1, 2, 5, 5)
    expected = model(x)
    with amanda.apply(tool):
        for _ in range(2):
            assert torch.equal(model(x), expected)
    assert tool.result().matches[0].refused == "1/relu_ works in place"


# Patterns.


class Writes(nn.Module):
    """An attention whose result is written in place."""

    def __init__(self, write: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.inputs, self.write = nn.Linear(8, 24), write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.inputs(x).view(2, 6, 2, 12).transpose(1, 2).chunk(3, -1)
        result: torch.Tensor = torch.softmax(query @ key.transpose(-1, -2) / 2.0, -1) @ value
        self.write(result)
        return result


@pytest.mark.parametrize(
    ("write", "by"),
    [
        (lambda y: y.add_(1.0), "add_"),
        (lambda y: y.transpose(1, 2).mul_(2.0), "mul_"),
        (lambda y: y[:, 0].unsqueeze(0).zero_(), "zero_"),
        (lambda y: None, None),
    ],
)
def test_a_result_that_is_saved_must_not_be_written(write: Any, by: str | None) -> None:
    torch.manual_seed(0)
    model, x = Writes(write), torch.randn(2, 6, 8)
    expected = gradients(model, model(x).sum())
    tool = Rewrite(["sdpa"])
    with amanda.apply(tool):
        for _ in range(3):
            assert_close(gradients(model, model(x).sum()), expected)
    (match,) = tool.result().matches
    assert match.refused == (by and f"the value of matmul#2 is written by {by}")
    assert bool(match.rewritten) == (by is None)


def rule_of(pattern: Operator, replacement: Callable[[Matched], Any]) -> Rewrite:
    tool = Rewrite(until="step")
    tool.add(Rule("test", pattern, replacement))
    return tool


def matches(tool: Rewrite, program: Callable[[], Any]) -> list[list[str]]:
    expected = program()
    with amanda.apply(tool):
        for _ in range(3):
            assert_close(program(), expected)
            amanda.step()
    return [match.ops for match in tool.result().matches if match.rewritten == 2]


SILU = Operator(
    ("mul",),
    {0: Input("x"), 1: Operator(("sigmoid",), {0: Input("x")}, "sigmoid")},
    "mul",
    commutative=True,
)


def silu(match: Matched) -> Any:
    return F.silu(match.inputs["x"])


def test_one_name_is_one_value_on_either_side() -> None:
    x, y = torch.randn(5), torch.randn(5)
    assert matches(rule_of(SILU, silu), lambda: x * x.sigmoid()) == [["sigmoid", "mul"]]
    assert matches(rule_of(SILU, silu), lambda: x.sigmoid() * x) == [["sigmoid", "mul"]]
    assert matches(rule_of(SILU, silu), lambda: y * x.sigmoid()) == []
    ordered = Operator(SILU.kinds, SILU.inputs, "mul")
    assert matches(rule_of(ordered, silu), lambda: x.sigmoid() * x) == []


def test_optional_operators_and_predicates() -> None:
    def pattern(where: Any = None) -> Operator:
        scaled = Operator(
            ("mul",), {0: Input("x"), 1: Input("s")}, "scaled", optional=True, where=where
        )
        return Operator(("exp",), {0: scaled}, "exp")

    def replacement(match: Matched) -> Any:
        value = match.inputs["x"]
        return torch.pow(torch.e, value * match.inputs.get("s", 1.0))

    x = torch.randn(5)
    assert matches(rule_of(pattern(), replacement), lambda: (x * 2).exp()) == [["mul", "exp"]]
    assert matches(rule_of(pattern(), replacement), lambda: x.tanh().exp()) == [["exp"]]
    # An operator that is not allowed is just a value.
    never = pattern(lambda op: False)
    assert matches(rule_of(never, lambda m: m.inputs["x"].exp()), lambda: (x * 2).exp()) == [
        ["exp"]
    ]
    by_name = Operator(("tanh",), {0: Operator(("sin_", "sin"), {0: Input("x")}, "sin")}, "tanh")
    tool = rule_of(by_name, lambda match: torch.tanh(torch.sin(match.inputs["x"])))
    assert matches(tool, lambda: x.sin().tanh() + x.cos().tanh()) == [["sin", "tanh"]]


def test_arguments_that_change_inside_of_a_match() -> None:
    first = Operator(("exp",), {0: Input("x")}, "exp")
    inner = Operator(("softmax",), {0: first}, "softmax")
    rule = Rule(
        "test",
        Operator(("tanh",), {0: inner}, "tanh"),
        lambda match: match.inputs["x"].exp().softmax(0).tanh(),
        lambda match: "another axis" if match.ops["softmax"].get("dim") else None,
    )
    tool = Rewrite(until="step")
    tool.add(rule)
    x = torch.randn(3, 4)
    with amanda.apply(tool):
        for dim in (0, 0, 0, 1, 1, 0):
            with amanda.disabled():
                expected = x.exp().softmax(dim).tanh()
            assert_close(x.exp().softmax(dim).tanh(), expected)
            amanda.step()
    (match,) = tool.result().matches
    assert (match.rewritten, match.fallbacks) == (3, {"another axis": 2})


def test_matches_do_not_overlap() -> None:
    pattern = Operator(("exp",), {0: Operator(("exp",), {0: Input("x")}, "first")}, "second")
    tool = rule_of(pattern, lambda match: match.inputs["x"].exp().exp())
    x = torch.randn(3) * 0.1
    assert len(matches(tool, lambda: x.exp().exp().exp())) == 1
    refusals = [match.refused for match in tool.result().matches]
    assert refusals[0] is None
    assert "is part of" in str(refusals[1])


def test_a_module_that_runs_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.pair = Pair()
            self.back = nn.Conv2d(6, 4, 1)

        def forward(self, x: torch.Tensor) -> Any:
            return self.pair(self.back(self.pair(x)))

    model, x = Twice().eval(), torch.randn(2, 4, 5, 5, requires_grad=True)
    expected = model(x)
    before = gradients(model, expected, x)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        for _ in range(3):
            output = model(x)
            assert_close(output, expected)
            for found, value in zip(gradients(model, output, x), before, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-3, atol=1e-3)
    assert sum(match.rewritten for match in tool.result().matches) == 4


# Attention.

SMALL: Any = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
}


def transformer(kind: str, attention: str) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model: Any
    config: Any
    chosen: Any = {"attn_implementation": attention}
    if kind == "bert":
        model = BertModel(BertConfig(**SMALL, vocab_size=50, **chosen))
        mask = torch.tensor([[1] * 7, [1] * 4 + [0] * 3])
        given = {"input_ids": torch.randint(0, 50, (2, 7)), "attention_mask": mask}
    elif kind == "gpt2":
        config = GPT2Config(
            n_embd=32,
            n_layer=2,
            n_head=4,
            vocab_size=50,
            n_positions=16,
            bos_token_id=None,
            eos_token_id=None,
            **chosen,
        )
        model, given = GPT2Model(config), {"input_ids": torch.randint(0, 50, (2, 7))}
    else:
        config = ViTConfig(**SMALL, image_size=16, patch_size=4, **chosen)
        model, given = ViTModel(config), {"pixel_values": torch.randn(2, 3, 16, 16)}
    return model.eval(), given


@pytest.mark.parametrize(("attention", "rule"), [("eager", "sdpa"), ("sdpa", "softmax")])
@pytest.mark.parametrize("kind", ["bert", "gpt2", "vit"])
def test_attention_there_and_back(kind: str, attention: str, rule: Any) -> None:
    model, given = transformer(kind, attention)
    expected = model(**given).last_hidden_state
    before = gradients(model, expected)
    tool = Rewrite(rules=[rule])
    with amanda.apply(tool):
        for _ in range(3):
            output = model(**given).last_hidden_state
            torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-5)
            for found, value in zip(gradients(model, output), before, strict=True):
                torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-3)
        with Counting() as counting, torch.no_grad():
            model(**given)
    fused = [name for name in counting.counts if "scaled_dot_product" in name]
    assert bool(fused) == (rule == "sdpa")
    assert ("_softmax" in counting.counts) == (rule == "softmax")
    report = tool.result().matches
    assert [(m.refused, m.rewritten, m.fallbacks) for m in report] == [(None, 3, {})] * 2


def test_probabilities_are_seen_and_changed() -> None:
    model, given = transformer("bert", "sdpa")
    eager, _ = transformer("bert", "eager")
    expected = eager(**given, output_attentions=True)
    seen: list[torch.Tensor] = []
    tool = Rewrite(rules=["softmax"])
    tool.listen(lambda op, name, value: seen.append(value))
    with amanda.apply(tool):
        model(**given)
        model(**given)
    for value, other in zip(seen, expected.attentions, strict=True):
        torch.testing.assert_close(value, other)
    tool.listen(lambda op, name, value: torch.zeros_like(value))
    with amanda.apply(tool):
        output = model(**given).last_hidden_state
    assert not torch.allclose(output, expected.last_hidden_state)


def test_probabilities_that_the_program_keeps() -> None:
    model, given = transformer("bert", "eager")
    expected = model(**given, output_attentions=True)
    tool = Rewrite(rules=["sdpa"])
    with amanda.apply(tool):
        for _ in range(4):
            output = model(**given, output_attentions=True)
            for found, value in zip(output.attentions, expected.attentions, strict=True):
                torch.testing.assert_close(found, value)
    assert all(match.kept for match in tool.result().matches)


def test_dropout_is_left() -> None:
    model, given = transformer("bert", "eager")
    model.train()
    tool = Rewrite(rules=["sdpa"])
    torch.manual_seed(3)
    expected = [model(**given).last_hidden_state for _ in range(3)]
    torch.manual_seed(3)
    with amanda.apply(tool):
        for value in expected:
            assert torch.equal(model(**given).last_hidden_state, value)
    assert [match.fallbacks for match in tool.result().matches] == [
        {"its dropout is random": 2}
    ] * 2


# The result.


def test_the_forms_of_the_result() -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    tool = Rewrite(rules=["conv_bn"])
    with amanda.apply(tool):
        traced(tool, model, x)
    assert isinstance(tool, HasResult)
    result = tool.result()
    assert isinstance(result, Result)
    data = json.loads(result.to_json())
    assert data["format"] == "amanda.rewrite/1"
    assert data["matches"][0]["rewritten"] == result.rewritten == 1
    assert "1 match, 0 refused; rewritten 1 time" in str(result.table())
    assert "<table>" in result._repr_html_()
    assert "No rules" not in result.table().title


def test_nothing_to_look_for_is_said() -> None:
    """As under `amanda run -t rewrite`."""
    idle = Rewrite()
    assert "No rules were given" in idle.result().table().title
    assert idle.changes_values is False, "a checkpoint of the program has all that it may have"
    tool = Rewrite(rules=["conv_bn", "sdpa"])
    assert tool.result().rules == ["conv_bn", "sdpa"]


@pytest.mark.parametrize("options", [{"rules": ["x"]}, {"interior": "x"}, {"until": "x"}])
def test_options_without_sense(options: Any) -> None:
    with pytest.raises(ValueError, match="must be"):
        Rewrite(**options)


def test_reasons_that_differ_in_names_alone_have_one_total() -> None:
    used = [
        f"the value of c.{n}/conv2d is used by {user}, too"
        for n, user in enumerate(["add", "b/add"])
    ]
    matches = [
        *(
            Rewritten("conv_bn", f"norm.{n}", None, [], refused=reason)
            for n, reason in enumerate(used)
        ),
        # Refused while the program ran, so that an execution fell back, too: one and the same.
        Rewritten("conv_bn", "norm.2", None, [], refused=used[0], fallbacks={used[0]: 1}),
        Rewritten("conv_bn", "norm.3", None, [], fallbacks={"the normalisation is in training": 5}),
    ]
    result = RewriteResult(matches, ["conv_bn"])
    assert result.reasons == {
        "the normalisation is in training": 5,
        "the value of … is used by …, too": 3,
    }
    assert "not rewritten: 5 as the normalisation is in training, 3 as" in result.table().title


@pytest.mark.filterwarnings("ignore:Compiled callables run eagerly")
def test_a_compiled_module_that_runs_eagerly_is_rewritten() -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    expected, tool = model(x), Rewrite(rules=["conv_bn"])
    compiled = torch.compile(model, backend="eager")
    with amanda.apply(tool):
        for _ in range(3):
            assert_close(compiled(x), expected)
    result = tool.result()
    assert [match.rewritten for match in result.matches] == [2]
    assert not any("searched" in note for note in result.notes)


def test_the_result_says_that_no_run_has_ended() -> None:
    model, x = Pair().eval(), torch.randn(2, 4, 5, 5)
    tools = {until: Rewrite(rules=["conv_bn"], until=until) for until in ("module", "step")}
    with amanda.apply(*tools.values()):
        for _ in range(2):
            F.relu(x)
    notes = {until: tool.result().notes for until, tool in tools.items()}
    assert [len(found) for found in notes.values()] == [1, 1]
    assert 'use until="step"' in notes["module"][0]
    assert "no step ended" in notes["step"][0]
    assert notes["module"][0] in tools["module"].result().table().title
    with amanda.apply(*tools.values()):
        model(x)
        amanda.step()
    assert [tool.result().notes for tool in tools.values()] == [[], []]
