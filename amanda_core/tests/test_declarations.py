"""What a driver declares in its table: a description, types of operators, roles, coverage."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from amanda_core.declarations import Declarations

TABLE = """
[driver]
api = 2
name = "toy"
modules = "toy toy_next"

[capabilities]
all = "gradients replace"
eager = "eager"
compiled = "graph"

[types]
matmul = "dot Product"
maximum = "max"

[roles]
"sub div" = "left right"
Product = "weight input"

[coverage]
"old operators" = "they run in C"
"""


class Context(dict[str, Any]):
    """A context of an op with this type and as many inputs, or of its backward op."""

    def __init__(self, op_type: str, inputs: int = 2, forward: Any = None) -> None:
        self.op_type, self.inputs, self.forward = op_type, inputs, forward

    def is_backward(self) -> bool:
        return self.forward is not None

    def get_inputs(self) -> list[int]:
        return [0] * self.inputs


@pytest.fixture
def declared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Declarations:
    (tmp_path / "toy_driver").mkdir()
    (tmp_path / "toy_driver/__init__.py").write_text("")
    (tmp_path / "toy_driver/driver.toml").write_text(TABLE)
    monkeypatch.syspath_prepend(str(tmp_path))
    return Declarations("toy_driver", lambda name: name.removeprefix("_v2_"))


def test_the_description_has_the_modes_of_its_capabilities(declared: Declarations) -> None:
    info = declared.info
    assert (info.api, info.name, info.modules) == (2, "toy", ("toy", "toy_next"))
    assert info.namespaces == ("toy/*/eager", "toy/*/compiled")
    assert info.capabilities_in("eager") == {"gradients", "replace", "eager"}
    assert info.capabilities_in("compiled") == {"gradients", "replace", "graph"}
    assert info.vocabulary is declared


@pytest.mark.parametrize(
    ("name", "common_type"),
    [
        ("dot", "matmul"),
        ("_v2_dot", "matmul"),
        ("max", "maximum"),  # The table comes before the common type of that name.
        ("relu", "relu"),
        ("_v2_relu", "relu"),
        ("strange", None),
    ],
)
def test_the_common_types_of_operators(
    declared: Declarations, name: str, common_type: str | None
) -> None:
    assert declared.get(name) == common_type


def test_a_vocabulary_lists_what_the_table_has(declared: Declarations) -> None:
    assert dict(declared) == {"dot": "matmul", "Product": "matmul", "max": "maximum"}


@pytest.mark.parametrize(
    ("context", "keys"),
    [
        (Context("sub"), {"type": "sub", "input_roles": ("left", "right")}),
        (Context("sub", inputs=1), {"type": "sub"}),
        (Context("Product"), {"type": "matmul", "input_roles": ("weight", "input")}),
        (Context("dot"), {"type": "matmul"}),
        (Context("strange"), {"type": None}),
        (Context("pull", forward={"type": "relu"}), {"backward_type": "relu_backward"}),
        (Context("pull", forward={"type": None}), {"backward_type": None}),
    ],
)
def test_contexts_get_types_and_roles(
    declared: Declarations, context: Any, keys: dict[str, Any]
) -> None:
    context.clear()
    assert declared.describe(context) == keys.get("type")
    assert context == keys


def test_a_type_that_the_table_cannot_tell(declared: Declarations) -> None:
    context: Any = Context("Layer")
    assert declared.describe(context, "div") == "div"
    assert context == {"type": "div", "input_roles": ("left", "right")}
    assert declared.describe(context, None) is None


def test_what_is_not_instrumented_has_a_reason(declared: Declarations) -> None:
    assert [(gap.what, gap.why) for gap in declared.gaps()] == [("old operators", "they run in C")]


def test_a_table_without_the_optional_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_driver").mkdir()
    (tmp_path / "short_driver/__init__.py").write_text("")
    (tmp_path / "short_driver/driver.toml").write_text(TABLE.partition("[types]")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    short = Declarations("short_driver")
    assert (len(short), short.gaps(), short.get("relu")) == (0, [], "relu")
    context: Any = Context("sub")
    short.describe(context)
    assert SimpleNamespace(**context) == SimpleNamespace(type="sub")
