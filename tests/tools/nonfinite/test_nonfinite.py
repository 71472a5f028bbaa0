"""Finder of non-finite values on PyTorch: planted faults, masks, origins of values."""

from __future__ import annotations

import functools
import inspect
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

import amanda
from amanda_core.errors import AmandaWarning
from amanda_core.results import HasResult, Result
from amanda_tools.nonfinite import NonFinite, NonFiniteError, NonFiniteResult

INF, NAN = math.inf, math.nan


def backward(value: Any) -> None:
    value.backward()


def find(program: Callable[[], Any], **options: Any) -> NonFiniteResult:
    tool = NonFinite(**options)
    with amanda.apply(tool):
        program()
    return tool.result()


# Each returns the number of the line to blame, that of the comment.


def here() -> int:
    frame = inspect.currentframe()
    assert frame is not None
    assert frame.f_back is not None
    return frame.f_back.f_lineno


def log_of_zero() -> int:
    x = torch.arange(3.0) * 1
    y, line = torch.log(x), here()
    y.exp().sum()
    return line


def zero_by_zero() -> int:
    x = torch.zeros(3)
    y, line = x / x, here()
    (y + 1).sum()
    return line


def zero_deviation() -> int:
    x = torch.ones(4, 3)
    y, line = (x - x.mean(0)) / x.std(0), here()
    y.sum()
    return line


def half_overflow() -> int:
    x = torch.full((2,), 300.0, dtype=torch.float16)
    y, line = x @ x, here()
    (y * 2).sum()
    return line


def cast_overflow() -> int:
    x = torch.full((2,), 1e30)
    y, line = x.half(), here()
    (y * 2).sum()
    return line


def gradient_of_a_root() -> int:
    x = nn.Parameter(torch.arange(3.0))
    y, line = torch.sqrt(x), here()
    backward((y * 3).sum())
    return line


def softmax_of_nothing() -> int:
    hidden = torch.tensor([[True, True], [False, True]])
    scores = torch.rand(2, 2).masked_fill(hidden, -INF)
    weights, line = torch.softmax(scores, -1), here()
    (weights @ torch.rand(2, 2)).sum()
    return line


def exponential_overflow() -> int:
    x = torch.full((2,), 100.0)
    line = here() + 1
    x.exp_()
    (x + 1).sum()
    return line


def infinity_less_infinity() -> int:
    x = torch.tensor([INF, 1.0])
    y, line = x - x, here()
    (y + 1).sum()
    return line


def sum_of_products() -> int:
    x = torch.tensor([[3e38, 3e38]])
    y, line = torch.einsum("ij->i", x), here()
    (y + 1).sum()
    return line


#: Program, operator and kind.
PLANTED: list[tuple[Callable[[], int], str, str]] = [
    (log_of_zero, "log", "inf"),
    (zero_by_zero, "div", "nan"),
    (zero_deviation, "div", "nan"),
    (half_overflow, "matmul", "inf"),
    (cast_overflow, "half", "inf"),
    (gradient_of_a_root, "sqrt", "inf"),
    (softmax_of_nothing, "softmax", "nan"),
    (exponential_overflow, "exp_", "inf"),
    (infinity_less_infinity, "sub", "nan"),
    (sum_of_products, "einsum", "inf"),
]


@pytest.mark.parametrize("wait", ["op", "step"])
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant[0].__name__)
def test_planted_faults(plant: tuple[Callable[[], int], str, str], wait: str) -> None:
    program, op, kind = plant
    lines = []
    found = find(lambda: lines.append(program()), wait=wait)
    first = found.first
    assert first is not None
    assert (first.type, first.kind) == (op, kind)
    assert first.source is not None
    assert first.source.endswith(f"{__file__.rpartition('/')[2]}:{lines[0]}")
    assert first.origin == ("gradient" if program is gradient_of_a_root else "operator")
    assert first.calls == 1
    if program is gradient_of_a_root:
        assert first.what == "SqrtBackward0"


def masked_after(operator: Callable[[Any, Any], Any], x: torch.Tensor) -> Callable[[], Any]:
    """Return a program whose NaN or infinity is masked, but saved for backward."""

    def program() -> None:
        weight = torch.ones(2, requires_grad=True)
        spoiled = x.log()
        loss: Any = torch.where(torch.tensor([True, False]), operator(spoiled, weight), 1.0)
        loss.sum().backward()

    return program


@pytest.mark.parametrize("number", [-1.0, 0.0])
@pytest.mark.parametrize(
    "operator",
    [
        lambda a, b: a * b,
        lambda a, b: a.exp() * b / a.exp(),
        lambda a, b: torch.where(torch.tensor([True, False]), a, 1.0) * b,
    ],
)
def test_what_saved_values_pass_on_is_no_second_fault(operator: Any, number: float) -> None:
    found = find(masked_after(operator, torch.tensor([2.0, number])))
    assert [(fault.origin, fault.type) for fault in found.faults][:1] == [("operator", "log")]
    assert [fault for fault in found.faults if fault.origin == "gradient"] == []


def test_a_gradient_that_finite_values_spoil_is_a_fault() -> None:
    def program() -> None:
        mask = torch.tensor([0.0, float("-inf")])
        x = torch.tensor([1.0, 0.0], requires_grad=True)
        loss: Any = x.sqrt() + (x + mask).softmax(0)
        loss.sum().backward()

    faults = find(program).faults
    assert [(fault.origin, fault.what) for fault in faults] == [("gradient", "SqrtBackward0")]


def test_parameters_that_a_fault_spoiled_are_not_blamed() -> None:
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), 1.0)

    def program() -> None:
        for _ in range(3):
            optimizer.zero_grad()
            (layer(torch.zeros(1, 2)) * 0).sum().sqrt().backward()
            optimizer.step()

    found = find(program)
    assert found.first is not None
    assert (found.first.origin, found.first.type, found.first.step) == ("gradient", "sqrt", 0)
    assert "parameter" not in {fault.origin for fault in found.faults}
    assert found.passed_on > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")
def test_masked_attention_is_no_fault(attention: Any, dtype: torch.dtype) -> None:
    size = {"vocab_size": 50, "attn_implementation": attention}
    bert: Any = BertModel(
        BertConfig(
            **size,
            hidden_size=16,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=32,
        )
    )
    gpt: Any = GPT2LMHeadModel(GPT2Config(**size, n_embd=16, n_layer=2, n_head=2, n_positions=16))
    ids = torch.randint(0, 50, (3, 6))
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [0, 0, 0, 1, 1, 1], [1] * 6])

    def program() -> None:
        bert.to(dtype)(ids, attention_mask=mask).last_hidden_state.sum().backward()
        gpt.to(dtype)(ids, attention_mask=mask, labels=ids).loss.backward()

    found = find(program)
    assert found.faults == []
    assert found.unchecked == {}
    assert found.checked > 100


def test_masks_of_infinities_are_no_fault() -> None:
    def program() -> None:
        scores = torch.rand(4, 4, requires_grad=True)
        added = torch.full((4, 4), -INF).triu(1)
        filled = torch.zeros(4, 4)
        filled[torch.ones(4, 4, dtype=torch.bool).triu(1)] = -INF
        chosen = torch.where(torch.ones(4, 4).tril() > 0, scores, -INF)
        for masked in (scores + added, scores + filled, chosen):
            backward(torch.softmax(masked, -1).sum())
        query = torch.rand(1, 1, 4, 8)
        nn.functional.scaled_dot_product_attention(query, query, query, attn_mask=added)

    found = find(program)
    assert found.faults == []
    assert found.passed_on > 0


def test_uninitialised_memory_is_no_fault() -> None:
    def program() -> None:
        x = torch.empty(1 << 12)
        x.view(torch.int32).fill_(-1)  # All NaN, and whole numbers to who wrote them.
        x.zero_()
        x + 1

    assert find(program).faults == []


def test_what_is_allowed() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.log(x)

    model = nn.Sequential(Logarithm(), nn.Softmax(-1))
    x = torch.tensor([0.0, 1.0])
    assert [f.type for f in find(lambda: model(x)).faults] == ["log"]
    for options in ({"allow_ops": ["log"]}, {"allow_modules": ["0"]}):
        found = find(lambda: model(x), **options)
        assert (found.faults, found.allowed) == ([], 1)
        assert "1 allowed" in found.title


@pytest.mark.parametrize(("what", "expected"), [("nan", ["div"]), ("inf", ["log"])])
def test_what_counts(what: str, expected: list[str]) -> None:
    def program() -> None:
        x = torch.tensor([0.0, -1.0, 1.0])
        torch.log(x)[::2]
        zero = torch.zeros(1)
        zero / zero

    found = find(program, what=what)
    assert [f.type for f in found.faults if f.kind == "nan"] == (
        ["log", "div"] if what == "nan" else []
    )
    assert [f.type for f in found.faults if f.kind == "inf"] == (["log"] if what == "inf" else [])


@pytest.mark.parametrize("wait", ["auto", "step"])
def test_raising(wait: str) -> None:
    after = []

    def program() -> None:
        torch.log(torch.zeros(2))
        after.append(1)
        amanda.step()

    with pytest.raises(NonFiniteError, match="The result of op 'log'") as caught:
        find(program, action="raise", wait=wait)
    # At once, or where a step ends.
    assert after == ([] if wait == "auto" else [1])
    assert caught.value.fault.type == "log"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert copy.fault == caught.value.fault


def test_raising_in_the_backward_pass() -> None:
    def program() -> None:
        backward(torch.sqrt(torch.zeros(2, requires_grad=True)).sum())

    with pytest.raises(NonFiniteError, match="by SqrtBackward0, has inf"):
        find(program, action="raise")
    assert find(program, backward=False).faults == []


def test_warning_once() -> None:
    def program() -> None:
        for _ in range(3):
            torch.log(torch.zeros(2))

    with pytest.warns(AmandaWarning, match="The result of op 'log'") as caught:
        found = find(program, action="warn")
    assert [warning.filename for warning in caught] == [__file__]
    assert found.faults[0].calls == 3


def test_each_nth_step() -> None:
    def program() -> None:
        for step in range(6):
            torch.log(torch.zeros(1) if step >= 3 else torch.ones(1))
            amanda.step()

    found = find(program, every=2)
    assert [(f.step, f.calls) for f in found.faults] == [(4, 1)]
    assert find(program).faults[0].step == 3


def test_dtypes_and_layouts() -> None:
    eight = torch.tensor([1.0, NAN]).to(torch.float8_e5m2)
    for value in (
        torch.tensor([1.0, complex(1, NAN)]),
        torch.eye(2).mul(NAN).to_sparse(),
        torch.tensor([[1.0, NAN]]).t()[1:],
        torch.tensor([1.0, NAN], dtype=torch.float64),
    ):
        doubled = functools.partial(torch.add, value, value)
        assert [f.origin for f in find(doubled).faults] == ["data"]
    assert [f.origin for f in find(lambda: eight.float()).faults] == ["data"]
    assert find(lambda: torch.empty(0) * 2).faults == []
    large = torch.full((2,), 1e300, dtype=torch.float64)
    assert find(lambda: large * 1, wait="step").faults == []
    assert find(lambda: large * large, wait="step").faults[0].kind == "inf"
    # Its sum overflows, it does not.
    assert find(lambda: torch.full((9,), 3e38) * 1).faults == []
    assert find(lambda: torch.full((9,), 6e4, dtype=torch.float16) * 1).faults == []


@pytest.mark.parametrize("wait", ["op", "step"])
def test_what_cannot_be_looked_at_is_said(wait: str) -> None:
    found = find(lambda: torch.ones(2, device="meta") * 2, wait=wait)
    assert found.faults == []
    assert found.unchecked == {"NotImplementedError at ones": 1, "NotImplementedError at mul": 2}
    assert "3 tensors not checked" in found.title


def test_forms_of_the_result() -> None:
    tool = NonFinite()
    assert isinstance(tool, HasResult)
    with amanda.apply(tool):
        log_of_zero()
    found = tool.result()
    assert isinstance(found, Result)
    assert found.table().rows[0][:3] == ("operator", "inf", "log")
    read = json.loads(found.to_json(), parse_constant=pytest.fail)
    assert read["format"] == "amanda.nonfinite/1"
    assert read["faults"][0]["outputs"][0]["first"] == [0]
    assert "<table>" in found._repr_html_()


@pytest.mark.parametrize("option", ["what", "action", "wait", "every"])
def test_options_are_checked(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} must be"):
        NonFinite(**{option: 0 if option == "every" else "none"})  # type: ignore[arg-type]


def test_norms_of_gradients_over_steps() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tool = NonFinite(norms=True, every=2)
    expected: dict[str, list[float]] = {name: [] for name, _ in model.named_parameters()}
    with amanda.apply(tool):
        for step in range(5):
            optimizer.zero_grad()
            loss: Any = model(torch.randn(5, 3)).square().sum()
            (loss / (0.0 if step == 4 else 1.0)).backward()
            for name, parameter in model.named_parameters():
                if step % 2 == 0:
                    assert parameter.grad is not None
                    expected[name].append(float(parameter.grad.norm()))
            optimizer.step()
    result = tool.result()
    assert result.gradient_steps == [0, 2, 4]
    found = {norms.weight.partition(":")[2]: norms.norms for norms in result.gradients}
    assert found.keys() == expected.keys()
    for name, norms in expected.items():
        assert found[name][:2] == pytest.approx(norms[:2], rel=1e-5), name
        assert found[name][2] is None
    assert result.first is not None
    assert result.first.step == 4
    content = json.loads(result.to_json())
    assert content["charts"][-1]["marks"] == [{"at": 4, "label": "the first fault"}]
    # Not measured unless it is requested.
    assert not NonFinite().result().gradients


def test_a_weight_of_two_operators_has_the_norms_of_both() -> None:
    weight = torch.nn.Parameter(torch.eye(3))
    tool = NonFinite(norms=True)
    with amanda.apply(tool):
        x = torch.ones(2, 3)
        loss: Any = (
            nn.functional.linear(x, weight) + 2 * nn.functional.linear(2 * x, weight)
        ).sum()
        loss.backward()
    norms = [found.norms for found in tool.result().gradients]
    # Each of nine elements has the sum of the rows of x, and four times that.
    assert norms == [[pytest.approx(6.0)], [pytest.approx(24.0)]]
