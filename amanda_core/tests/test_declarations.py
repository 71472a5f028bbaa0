"""What a driver declares in its table: a description, types of operators, roles, coverage."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from amanda_core.driver_kit.declarations import Declarations
from amanda_core.driver_kit.declared_hooks import DeclaredHooks
from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.errors import DriverError
from amanda_core.interface.driver import DriverStatus, Finding

TABLE = """
[driver]
api = 3
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

[framework]
name = "Toy"
oldest = "2.0"
newest = "2.3.99"
complete = "nn"
interception = "Operators pass through toy.call"

[names]
containers = "loop branch"
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
    assert (info.api, info.name, info.modules) == (3, "toy", ("toy", "toy_next"))
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


def test_names_for_the_drivers_own_use(declared: Declarations) -> None:
    assert declared.names == {"containers": ("loop", "branch")}


def _listing() -> Any:
    return list


def test_hooks_of_a_driver_with_a_table(
    declared: Declarations, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Finding] = []
    hooks: Any = DeclaredHooks(declared, lambda context: context.clear(), _listing, found.copy)
    assert hooks.amanda_driver_info() is declared.info
    assert hooks.versions.driver == "toy-driver"
    monkeypatch.delitem(sys.modules, "toy", raising=False)
    assert hooks.amanda_attach("abc") is None
    assert hooks.amanda_driver_status() == DriverStatus(None, "", "Toy is not installed")

    toy: Any = ModuleType("toy")
    toy.__version__ = "2.1"
    monkeypatch.setitem(sys.modules, "toy", toy)
    assert hooks.amanda_attach("abc") is None  # Its import is not done.
    toy.nn = None
    assert hooks.amanda_attach("abc") == ["a", "b", "c"]
    why = "Operators pass through toy.call"
    assert hooks.amanda_driver_status() == DriverStatus("2.1", "python", why)

    found.append(Finding("warning", "slow", "wait"))
    assert (hooks.amanda_attach("abc"), hooks.amanda_preflight()) == (["a", "b", "c"], found)
    found.append(Finding("error", "wrong", "turn it off"))
    with pytest.raises(DriverError, match="wrong"):
        hooks.amanda_attach("abc")
    assert hooks.amanda_driver_status() == DriverStatus("2.1", "", "", "wrong")
    toy.__version__ = "1.9"
    with pytest.raises(DriverError, match=r"Toy 1\.9 is older than 2.0"):
        hooks.amanda_attach("abc")


def test_hooks_refuse_a_release_without_what_the_driver_imports(
    declared: Declarations, monkeypatch: pytest.MonkeyPatch
) -> None:
    toy: Any = ModuleType("toy")
    toy.__version__ = toy.nn = "2.9"
    monkeypatch.setitem(sys.modules, "toy", toy)
    hooks: Any = DeclaredHooks(declared, lambda _: None, lambda: toy.missing)
    assert [finding.severity for finding in hooks.amanda_preflight()] == ["warning"]
    with pytest.raises(DriverError, match=r"Toy 2\.9 is not known: .*missing"):
        hooks.amanda_attach("abc")


def test_a_release_that_was_not_tried_is_self_tested_at_the_first_apply(
    declared: Declarations, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs, test = tmp_path / "runs", tmp_path / "self_test_of_toy.py"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("importlib_metadata.version", lambda name: "1.0")
    toy: Any = ModuleType("toy")
    toy.__version__ = toy.nn = "2.9"
    monkeypatch.setitem(sys.modules, "toy", toy)
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: str(toy.__version__))
    declared.framework = {**declared.framework, "self_test": test.stem}
    wrong = Finding("error", "wrong", "turn it off")
    for version, failure in (("2.9", "add was not seen"), ("2.8", "")):
        toy.__version__ = version
        test.write_text(
            f"open({str(runs)!r}, 'a').write('.')\nraise SystemExit({failure or 0!r})\n"
        )
        hooks: Any = DeclaredHooks(declared, lambda _: None, _listing)
        before = hooks.amanda_driver_status()
        assert "runs at the first `apply`" in before.why
        for _ in range(2):
            if failure:
                with pytest.raises(DriverError, match=failure):
                    hooks.amanda_attach("abc")
            else:
                assert hooks.amanda_attach("abc") == ["a", "b", "c"]
        after = hooks.amanda_driver_status()
        assert (failure in after.refused) if failure else ("passed" in after.why)
        # What else is wrong is said as well.
        others: Any = DeclaredHooks(declared, lambda _: None, _listing, lambda: [wrong])
        assert (wrong in others.amanda_preflight()) is not bool(failure)
    assert runs.read_text() == ".."


def test_hooks_may_be_a_plugin_of_a_framework_in_another_distribution(
    declared: Declarations,
) -> None:
    declared.framework = {**declared.framework, "distributions": "pluggy"}
    hooks = DeclaredHooks(declared, declared.describe, _listing)
    assert hooks.versions.distributions == ("pluggy",)
    assert hooks.versions.installed() is not None
    assert hooks.__name__ == "toy_driver"  # By which warnings find the driver's own frames.


@pytest.mark.parametrize(("namespace", "kept"), [("toy/2/eager", 0), ("toys/2/eager", 1)])
def test_hooks_describe_their_own_contexts(
    declared: Declarations, namespace: str, kept: int
) -> None:
    context: Any = Context("sub")
    context.namespace, context["key"] = namespace, True
    hooks: Any = DeclaredHooks(declared, lambda context: context.clear(), _listing)
    hooks.amanda_prepare_context(context)
    assert len(context) == kept


def test_a_table_without_the_optional_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "short_driver").mkdir()
    (tmp_path / "short_driver/__init__.py").write_text("")
    (tmp_path / "short_driver/driver.toml").write_text(TABLE.partition("[types]")[0])
    monkeypatch.syspath_prepend(str(tmp_path))
    short = Declarations("short_driver")
    assert (len(short), short.gaps(), short.get("relu")) == (0, [], "relu")
    assert (short.framework, short.names) == ({}, {})
    context: Any = Context("sub")
    short.describe(context)
    assert SimpleNamespace(**context) == SimpleNamespace(type="sub")
