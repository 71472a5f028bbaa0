"""The conformance kit: each core test catches a wrong driver; oracle; summary."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from amanda_core.testing import (
    CAPABILITIES,
    MODELS,
    Backend,
    Edits,
    Rig,
    conformance,
    core_tests,
    differentiate,
    evaluate,
    needs,
    source_of,
)
from amanda_core.testing.kit.capabilities import needs_of
from amanda_core.testing.kit.conformance import suite_tests
from amanda_core.testing.kit.models import CORE_TYPES
from amanda_core.testing.kit.oracle import mapped, same
from amanda_core.testing.toy import framework as toy
from amanda_core.testing.toy.driver import CAPABILITIES as CAPABILITIES_OF_TOY, REPLACED

from .broken_drivers import (
    BROKEN,
    Broken,
    CachesPlans,
    RemembersExceptions,
    RestoresAfterErrorsOnly,
    Sabotaged,
    broken_driver,
)
from .conformance_backend import ToyBackend
from .site import Site

pytest_plugins = ["pytester"]


# Broken drivers.


@contextmanager
def toy_as_it_was() -> Iterator[None]:
    names = (*REPLACED, "parameter")
    found = {name: getattr(toy, name) for name in names}
    try:
        yield
    finally:
        for name in names:
            setattr(toy, name, found[name])


@pytest.fixture(autouse=True)
def _toy_as_it_was() -> Iterator[None]:
    with toy_as_it_was():
        yield


def result_of(name: str, driver: Sabotaged) -> BaseException | None:
    """Return how a driver fails a test of the suite, or None if it passes."""
    backend = ToyBackend(driver)
    with toy_as_it_was(), backend.registered():
        try:
            suite_tests()[name](Rig(backend, backend.info()))
        except (Exception, pytest.fail.Exception) as error:
            return error
    return None


def failures_of(driver: type[Broken] | type[Sabotaged]) -> list[str]:
    """Return the core tests that a driver fails."""
    return [name for name in core_tests() if result_of(name, broken_driver(driver)) is not None]


def test_there_is_a_broken_driver_for_each_core_test() -> None:
    assert set(BROKEN) == set(core_tests())
    assert len(set(BROKEN.values())) == len(BROKEN)


@pytest.mark.parametrize("right", [Broken, CachesPlans, RemembersExceptions])
def test_the_scaffold_of_the_broken_drivers_is_right_by_itself(right: type[Broken]) -> None:
    assert failures_of(right) == []


@pytest.mark.parametrize("name", sorted(BROKEN))
def test_a_broken_driver_is_caught_by_exactly_its_test(name: str) -> None:
    assert failures_of(BROKEN[name]) == [name]


def test_a_driver_that_only_errors_restore_is_caught_by_an_interruption() -> None:
    assert failures_of(RestoresAfterErrorsOnly) == []
    interrupted = "test_an_exception_at_a_sample_of_all_lines"
    assert result_of(interrupted, broken_driver(RestoresAfterErrorsOnly)) is not None
    assert result_of(interrupted, broken_driver(Broken)) is None


# What is written about it.

DOCUMENT = Path(__file__).parents[2] / "docs" / "conformance.md"


def test_each_test_is_explained_in_the_documentation() -> None:
    lines = DOCUMENT.read_text(encoding="utf-8").splitlines()
    rows = [line for line in lines if "`test_" in line]
    expected = []
    modules = {inspect.getmodule(test) for test in suite_tests().values()}
    headings = {(inspect.getdoc(module) or "").replace("``", "`") for module in modules}
    assert headings <= {line.strip("*") for line in lines if line.startswith("**")}
    for name, test in suite_tests().items():
        summary = (inspect.getdoc(test) or "").splitlines()[0].replace("``", "`")
        expected.append(f"| `{name}` | {needs_of(test).group} | {summary} |")
    assert rows == expected


def test_each_capability_is_explained_in_the_documentation() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    for capability, meaning in CAPABILITIES.items():
        assert f"| `{capability}` | {meaning} |" in text


# The oracle.


@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_the_oracle_are_slopes(name: str) -> None:
    model = MODELS[name]
    values = model.values((2, 2))
    seeds = model.seeds((2, 2))
    found = differentiate(model, values, seeds).gradients
    assert set(found) == {*model.inputs, *model.parameters}

    def total(value: Any) -> float:
        return sum(map(total, value)) if isinstance(value, list) else value

    def weighted(changed: dict[str, Any]) -> float:
        outputs = evaluate(model, changed).outputs
        parts = [mapped(lambda a, b: a * b, o, s) for o, s in zip(outputs, seeds, strict=True)]
        return total(parts)

    for operand in found:
        gradient: Any = found[operand]
        for row in range(2):
            for column in range(2):
                sides = []
                for by in (1e-6, -1e-6):
                    moved: Any = [list(line) for line in values[operand]]  # type: ignore[arg-type, union-attr]
                    moved[row][column] += by
                    sides.append(weighted({**values, operand: moved}))
                slope = (sides[0] - sides[1]) / 2e-6
                assert slope == pytest.approx(gradient[row][column], rel=1e-4, abs=1e-6)


def test_edits_of_the_oracle_go_straight_through() -> None:
    values = {"x": 2.0, "w": 3.0, "b": -1.0}
    # relu(2 * 3 - 1): its input made negative has no slope, whatever it was.
    edited = Edits(before={("y", 0): lambda n: -n})
    trace = differentiate(MODELS["chain"], values, [1.0], edited)
    assert trace.outputs == [0.0]
    assert trace.gradients == {"x": 0.0, "w": 0.0, "b": 0.0}
    # The product's own formula sees the new weight; the weight gets the gradient as it is.
    doubled = Edits(before={("h", 1): lambda n: 2 * n})
    trace = differentiate(MODELS["chain"], values, [1.0], doubled)
    assert trace.outputs == [11.0]
    assert trace.gradients == {"x": 6.0, "w": 2.0, "b": 1.0}


def test_gradient_edits_of_the_oracle() -> None:
    values = {"x": 2.0, "w": 3.0}
    model = MODELS["tied"]  # x * w + w
    part = Edits(grad_after={("h", 1): lambda n: 10 * n})
    assert differentiate(model, values, [1.0], part).gradients == {"x": 3.0, "w": 21.0}
    whole = Edits(grad_before={"h": lambda n: 10 * n})
    trace = differentiate(model, values, [1.0], whole)
    assert trace.gradients == {"x": 30.0, "w": 21.0}
    assert trace.arriving == {"h": 1.0, "y": 1.0}
    other = Edits(backward={"h": lambda g: [0.0, g]})
    assert differentiate(model, values, [1.0], other).gradients == {"x": 0.0, "w": 2.0}


def test_values_are_the_same_only_in_one_shape() -> None:
    assert same([1.0, [2.0]], [1.0, [2.0]])
    assert not same([1.0], [1.0, 1.0])
    assert not same([1.0], 1.0)
    assert not same([1.0 + 1e-4], [1.0], 1e-5)
    assert same([1.0 + 1e-6], [1.0], 1e-5)
    assert not same(None, 0.0)
    assert not same(float("nan"), float("nan"))


# Models.


def test_core_models_need_core_words_only() -> None:
    for name, model in MODELS.items():
        if name not in ("dense", "reduced"):
            assert model.common_types <= CORE_TYPES, name


def test_each_op_has_a_line_and_modules_are_functions() -> None:
    assert source_of(MODELS["loop"]).splitlines() == [
        "def loop(x, w):",
        "    y = x",
        "    for _ in range(3):",
        "        h = mul(x, w)",
        "        y = relu(h)",
        "        x = y",
        "    return (y,)",
    ]
    assert source_of(MODELS["scoped"]).splitlines() == [
        "def in_net_one(x, w):",
        "    h = mul(x, w)",
        "    return (h,)",
        "",
        "def in_net_two(h, b):",
        "    a = add(h, b)",
        "    return (a,)",
        "",
        "def in_net(x, w, b):",
        "    (h,) = in_net_one(x, w)",
        "    (a,) = in_net_two(h, b)",
        "    y = relu(a)",
        "    return (h, a, y,)",
        "",
        "def scoped(x, w, b):",
        "    (h, a, y,) = in_net(x, w, b)",
        "    return (y,)",
    ]


# Marks.


def test_a_mark_names_a_known_capability() -> None:
    with pytest.raises(ValueError, match="telepathy"):
        needs("telepathy")


def test_each_capability_but_modes_has_a_test() -> None:
    groups = {needs_of(test).group for test in suite_tests().values()}
    assert groups == {
        "core",
        "more operators",
        "interruptions",
        "optional programs",
        *CAPABILITIES,
    } - {
        "eager",
        "graph",
        "export",
    }


def test_every_test_says_what_a_driver_must_do() -> None:
    for name, test in suite_tests().items():
        assert test.__doc__, name


# A framework that is imported under tools.

BACKEND = """
import toyframe
from amanda_core.testing import Backend
from .numbers_of_toys import number


class ToyframeBackend(Backend):
    driver = "toy"
    shape = ()
    functions = {"add": toyframe.add, "mul": toyframe.mul, "relu": toyframe.relu}

    def from_python(self, value, like=None):
        return toyframe.Value(value)

    def to_python(self, value):
        return number(value)
"""


WORDS = """
@hookimpl
def amanda_prepare_context(context):
    context["type"] = context.op_type
"""


@pytest.mark.parametrize("attaches", [True, False])
def test_a_driver_that_does_not_attach_after_the_import_is_caught(
    tmp_path: Path, attaches: bool
) -> None:
    site = Site(tmp_path)
    file = site.write("toy_backend.py", BACKEND)
    site.write("numbers_of_toys.py", "def number(value):\n    return value.data\n")
    plugin = site.path / "toyplugin.py"
    text = plugin.read_text() + WORDS
    # A driver that never attaches.
    never = text.replace('if "toyframe" not in sys.modules:', "if True:")
    assert never != text
    plugin.write_text(text if attaches else never)
    command = [
        "-W",
        "ignore",
        "-m",
        "amanda_core.testing.kit.importing",
        str(file),
        "ToyframeBackend",
    ]
    done = site.python(*command, stdin=json.dumps([str(site.path), *sys.path]))
    assert (done.returncode == 0) == attaches, done.stderr
    assert done.stdout == ("instrumented\n" if attaches else "")


# Running the suite.


class Forgetful(ToyBackend):
    """Declares one capability that it cannot show and one that does not exist."""

    without = {"steps": "nothing trains here"}  # noqa: RUF012  Read only.

    def __init__(self) -> None:
        driver = Sabotaged()
        declared = {*driver.info.capabilities_in("eager"), "recomputed_edits"} - {"scopes"}
        object.__setattr__(driver.info, "capabilities", frozenset(declared))
        super().__init__(driver)


class Untrue(ToyBackend):
    """A backend of a driver that fails one core test."""

    def __init__(self) -> None:
        super().__init__(broken_driver(BROKEN["test_keys_persist"]))


@pytest.fixture(autouse=True)
def _numpy_stays() -> None:
    # A test session inside of a test drops the modules that it imports, and NumPy can be loaded
    # only once in a process: the next test that reads values would fail.
    with suppress(ImportError):
        import numpy  # noqa: F401


def run(pytester: pytest.Pytester, *arguments: str) -> pytest.RunResult:
    options = ["-p", "amanda_core.testing.plugin", "-p", "no:cacheprovider"]
    return pytester.runpytest_inprocess(*options, *arguments)


SUITE = ("--pyargs", "amanda_core.testing.suite")


def named(backend: type[Backend]) -> str:
    return f"--amanda-backend={backend.__module__}:{backend.__name__}"


def test_a_whole_driver_conforms(pytester: pytest.Pytester) -> None:
    result = run(pytester, *SUITE, named(ToyBackend), "--amanda-report=report.json", "-rs")
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        ["*toy eager conforms: *", "SKIPPED*the driver 'toy' does not declare 'staged'*"]
    )
    written = json.loads(Path(pytester.path, "report.json").read_text())
    assert written["conforms"] is True
    (toys,) = written["backends"]
    assert toys["namespaces"] == ["toy/1.2.3/eager"]
    assert toys["capabilities"]["gradients"] == "passed"
    assert toys["capabilities"]["staged"] == "undeclared"
    assert sorted(toys["tests"]["core"]["passed"]) == sorted(core_tests())
    assert toys["tests"]["core"]["skipped"] == {}
    table = Path(pytester.path, "report.md").read_text()
    assert "| toy eager |" in table
    assert f"| core | {len(BROKEN)} of {len(BROKEN)} |" in table
    assert "| `staged` | undeclared |" in table
    assert "| versions | toy 1.2.3 |" in table
    assert "| result | **conforms** |" in table
    assert "`test_a_staged_replacement`: the driver 'toy' does not declare 'staged'" in table
    assert "Failed" not in table
    assert "Not run" not in table
    assert toys["versions"] == {"toy": "1.2.3"}
    assert set(toys["declared"]) == CAPABILITIES_OF_TOY
    assert toys["not_run"] == []
    assert written["format"] == "amanda-conformance/1"


def test_a_capability_that_is_declared_and_missing_fails(pytester: pytest.Pytester) -> None:
    words = "step or scope or recomput or module"
    result = run(
        pytester, *SUITE, named(Forgetful), "-k", words, "-rs", "--amanda-report=out/report.json"
    )
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        [
            "*toy eager does not conform: *",
            "SKIPPED*toy eager has no 'steps': nothing trains here*",
            "SKIPPED*the driver 'toy' does not declare 'scopes'*",
        ]
    )
    (written,) = json.loads(Path(pytester.path, "out/report.json").read_text())["backends"]
    assert written["capabilities"]["recomputed_edits"] == "failed"
    assert written["capabilities"]["scopes"] == "undeclared"
    assert written["capabilities"]["steps"] == "not in this mode: nothing trains here"
    assert written["capabilities"]["replace"] == "not run"
    assert written["conforms"] is False
    table = Path(pytester.path, "out/report.md").read_text()
    failed = table.partition("## Failed: toy eager")[2].partition("##")[0]
    assert "- `test_what_is_recomputed_is_edited_again[0]`: NotImplementedError: " in failed
    assert "- `test_keys_persist`" in table.partition("## Not run")[2]


def test_a_part_of_the_suite_is_no_conformance(pytester: pytest.Pytester) -> None:
    result = run(
        pytester, *SUITE, named(ToyBackend), "-k", "keys_persist", "--amanda-report=report.json"
    )
    assert result.ret == 0
    result.stdout.fnmatch_lines(
        [f"*toy eager ran without {len(suite_tests()) - 1} tests: core 1/1"]
    )
    assert json.loads(Path(pytester.path, "report.json").read_text())["conforms"] is False


def test_a_failure_shows_the_values(pytester: pytest.Pytester) -> None:
    result = run(pytester, *SUITE, named(Untrue), "-k", "keys_persist")
    assert result.ret == 1
    result.stdout.fnmatch_lines(
        ["E *assert ?None? == ?'here'?", "*toy eager does not conform: core 0/1"]
    )


def test_the_suite_as_a_class(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(
        f"""
        from amanda_core.testing import conformance
        from {Untrue.__module__} import ToyBackend, Untrue

        TestOne = conformance(ToyBackend)
        TestOther = conformance(Untrue())
        """
    )
    # Without the plugin, as a driver's own tests may be run.
    result = pytester.runpytest_inprocess("-k", "persist", "--strict-markers")
    assert result.ret == 1
    result.assert_outcomes(passed=1, failed=1)
    result.stdout.fnmatch_lines(["E *assert ?None? == ?'here'?"])


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ([], "*Say --amanda-backend=*"),
        pytest.param(
            ["--amanda-backend=nowhere"],
            "*write it as module:attribute*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--amanda-backend=nowhere:Nothing"],
            "*No module named 'nowhere'*",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            ["--amanda-backend=json:loads"],
            "*is not an amanda_core.testing.Backend*",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_options_that_cannot_be_followed(
    pytester: pytest.Pytester, option: list[str], message: str
) -> None:
    result = run(pytester, *SUITE, *option)
    assert result.ret != 0
    result.stdout.fnmatch_lines([message])


def test_a_class_is_of_the_whole_suite() -> None:
    made = conformance(ToyBackend)
    assert set(suite_tests()) <= set(vars(made))
