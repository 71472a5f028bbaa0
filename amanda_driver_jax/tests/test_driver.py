"""Facts, names, errors and limits of this driver, which the conformance kit cannot know."""

# mypy: allow-untyped-decorators

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import amanda
from amanda_core.driver_kit.framework_versions import FrameworkVersions
from amanda_core.errors import LateActionError, UnsupportedError
from amanda_core.interface.vocabulary import AXES, INPUT_ROLES, OP_TYPES as COMMON_TYPES
from amanda_core.plugins import discovery
from amanda_driver_jax import plugin
from amanda_driver_jax.facts import FACTS
from amanda_driver_jax.vocabulary import DECLARATIONS

X = jnp.array([0.3, 1.2])


def looking(contexts: list[amanda.OpContext]) -> amanda.Tool:
    tool = amanda.Tool()
    tool.add_inst_for_op(contexts.append)
    return tool


def contexts_of(run: Callable[[], Any]) -> list[amanda.OpContext]:
    contexts: list[amanda.OpContext] = []
    with amanda.apply(looking(contexts)):
        run()
    return contexts


def test_facts_of_an_op() -> None:
    x = jnp.ones((2, 2))
    (context,) = contexts_of(lambda: jnp.matmul(x, x))
    assert context.name == "matmul"
    assert context["type"] == "matmul"
    assert context.namespace == f"jax/{jax.__version__}/eager"
    assert (context.source or "").startswith("test_driver.py:")


def test_operators_of_a_jitted_function_are_known_by_their_lines() -> None:
    def layer(x: Any) -> Any:
        return jnp.tanh(x)

    def model(x: Any) -> Any:
        for _ in range(3):
            x = layer(x)
        return layer(x) + 1

    x = jnp.ones(3)
    contexts = contexts_of(lambda: jax.jit(model)(x))
    assert [context.op_type for context in contexts] == ["tanh"] * 4 + ["add"]
    assert len({context.get_op_id() for context in contexts}) == 5
    again = contexts_of(lambda: jax.jit(model)(x))
    assert [c.get_op_id() for c in again] == [c.get_op_id() for c in contexts]


@pytest.mark.parametrize("transform", [jax.grad, jax.vmap, jax.jacfwd, jax.checkpoint])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_named_scopes_are_paths_in_transformations_too(
    transform: Callable[..., Any], jitted: bool
) -> None:
    def model(x: Any) -> Any:
        with jax.named_scope("first"), jax.named_scope("inner"):
            x = jnp.sin(x)
        with jax.named_scope("last"):
            return jnp.tanh(x).sum()

    run = jax.jit(transform(model)) if jitted else transform(model)
    found = {context.op_type: context.module_path for context in contexts_of(lambda: run(X))}
    assert (found["sin"], found["tanh"]) == ("first/inner", "last")


def test_the_value_of_an_argument_is_known_while_tracing() -> None:
    found: list[Any] = []

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "mul":
            found.extend(context.value(position) for position in (0, 1))

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    weight = jnp.arange(3.0)
    with amanda.apply(tool):
        jax.jit(lambda w, x: jnp.exp(x) * w)(weight, jnp.ones(3))
    assert found[0] is None
    assert np.array_equal(found[1], weight)


@pytest.mark.parametrize("copied", [lax.stop_gradient, jnp.asarray, lambda x: x.astype(x.dtype)])
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_the_value_of_a_copy_is_known(jitted: bool, copied: Callable[[Any], Any]) -> None:
    found: list[Any] = []
    tool = amanda.Tool()

    def analyse(context: amanda.OpContext) -> None:
        value = context.value(0)
        if context["type"] == "sin":
            found.append(value)

    tool.add_inst_for_op(analyse)
    gradient = jax.grad(lambda x: jnp.sin(copied(x)).sum())
    with amanda.apply(tool):
        (jax.jit(gradient) if jitted else gradient)(X)
    (value,) = found
    assert np.array_equal(value, X)


@pytest.mark.parametrize("common_type", sorted(set(DECLARATIONS.values())))
def test_the_types_are_common_ones(common_type: str) -> None:
    assert common_type in COMMON_TYPES


@pytest.mark.parametrize(
    ("run", "common_type"),
    [
        (lambda x: jnp.max(x), "max"),
        (lambda x: jnp.maximum(x, 0), "maximum"),
        (lambda x: lax.max(x, x), "maximum"),
        (lambda x: jnp.where(x, x, 0.0), "where"),
        (lambda x: jnp.take(x, jnp.array([0])), "gather"),
        (lambda x: jnp.std(x), "std"),
        (lambda x: x**2, "pow"),
        (lambda x: x.T, "transpose"),
        (lambda x: x.astype(jnp.float16), "cast"),
        (lambda x: jax.nn.silu(x), "silu"),
        (lambda x: jax.nn.log_softmax(x), "log_softmax"),
        (lambda x: jnp.einsum("ij,ij->i", x, x), "einsum"),
        (lambda x: lax.logistic(x), "sigmoid"),
        (lambda x: lax.broadcast(x, (2,)), "expand"),
        (lambda x: lax.top_k(x, 1), "topk"),
    ],
)
def test_common_types(run: Callable[[Any], Any], common_type: str) -> None:
    x = jnp.ones((2, 2))
    assert common_type in [context["type"] for context in contexts_of(lambda: run(x))]


def test_roles_and_layouts_of_convolutions() -> None:
    def run() -> None:
        image, kernel = jnp.ones((1, 5, 5, 3)), jnp.ones((3, 3, 3, 2))
        numbers = ("NHWC", "HWIO", "NHWC")
        lax.conv_general_dilated(image, kernel, (1, 1), "SAME", dimension_numbers=numbers)
        lax.conv_transpose(image, kernel, (2, 2), "SAME", dimension_numbers=numbers)
        lax.conv(jnp.ones((1, 3, 5, 5)), jnp.ones((2, 3, 3, 3)), (1, 1), "SAME")

    found = [c for c in contexts_of(run) if str(c["type"]).startswith("conv")]
    assert [context["type"] for context in found] == ["conv2d", "conv_transpose2d", "conv2d"]
    assert [context["layout"] for context in found] == ["NHWC", "NHWC", "NCHW"]
    assert [context["weight_layout"] for context in found] == ["HWIO", "HWIO", "OIHW"]
    assert all(set(context["weight_layout"]) <= set(AXES) for context in found)
    assert all(set(context["input_roles"]) <= set(INPUT_ROLES) for context in found)


def test_layouts_of_products() -> None:
    def run() -> None:
        x, w = jnp.ones((4, 2)), jnp.ones((2, 3))
        jnp.matmul(x, w)
        lax.dot_general(x, w.T, (((1,), (1,)), ((), ())))

    found = [context for context in contexts_of(run) if context["type"] == "matmul"]
    assert [context["weight_layout"] for context in found] == ["IO", "OI"]


def test_facts_of_tensors() -> None:
    array = jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3)
    assert FACTS.is_tensor(array)
    assert FACTS.is_tensor(np.ones(3))
    assert not FACTS.is_own(np.ones(3))
    assert not FACTS.is_tensor(3.0)
    assert (FACTS.dtype(array), FACTS.shape(array), FACTS.device(array)) == (
        "bfloat16",
        (2, 3),
        "cpu",
    )
    assert FACTS.nbytes(array) == 12
    assert FACTS.values(array).dtype == np.uint16
    storage = FACTS.storage(array)
    assert storage is not None
    assert storage.nbytes == 12
    layouts: list[str] = []
    jax.jit(lambda x: layouts.append(FACTS.layout(x)))(array)
    assert layouts == ["symbolic"]


# Gradients.


def scaling(factor: float, **options: Any) -> amanda.Tool:
    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "sin":
            context.insert_before_backward_op(lambda g: g * factor, grad_outputs=[0])

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse, **options)
    return tool


@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_an_edited_gradient(jitted: bool) -> None:
    gradient = jax.grad(lambda x: jnp.sin(x).sum())
    run = jax.jit(gradient) if jitted else gradient
    x = jnp.array([0.3, 1.2])
    with amanda.apply(scaling(3.0)):
        assert np.allclose(run(x), 3 * jnp.cos(x))
    assert np.allclose(run(x), jnp.cos(x))


def test_a_second_derivative_takes_an_edited_gradient_for_a_constant_factor() -> None:
    with amanda.apply(scaling(3.0)):
        found = jax.grad(lambda x: jax.grad(jnp.sin)(x) * x)(0.5)
    assert np.isfinite(found)


def test_a_late_request_for_gradients_is_refused() -> None:
    with amanda.apply(scaling(3.0, require_outputs=True)), pytest.raises(LateActionError):
        jnp.sin(jnp.ones(2))


def _curve(x: Any) -> Any:
    return jnp.sin(x) * x


def _slope(x: Any) -> Any:
    return jnp.cos(x) * x + jnp.sin(x)


def _bend(x: Any) -> Any:
    return 2 * jnp.cos(x) - x * jnp.sin(x)


def _pushed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda x: jax.jvp(function, (x,), (jnp.ones_like(x),))[1]


def _looped(x: Any) -> Any:
    return lax.scan(lambda c, _: (_curve(c), None), x, None, length=1)[0]


#: Derivatives in forward mode, each with what it is by hand.
FORWARD: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "jvp": (_pushed(_curve), _slope),
    "jvp(jit)": (_pushed(jax.jit(_curve)), _slope),
    "jit(jvp(jit))": (jax.jit(_pushed(jax.jit(_curve))), _slope),
    "jvp(vmap)": (_pushed(jax.vmap(_curve)), _slope),
    "vmap(jvp(jit))": (jax.vmap(_pushed(jax.jit(_curve))), _slope),
    "jvp(scan)": (_pushed(_looped), _slope),
    "jvp(checkpoint)": (_pushed(jax.checkpoint(_curve)), _slope),
    "linearize": (lambda x: jax.linearize(_curve, x)[1](jnp.ones_like(x)), _slope),
    "linearize(jit)": (lambda x: jax.linearize(jax.jit(_curve), x)[1](jnp.ones_like(x)), _slope),
    "jvp(jvp(jit))": (_pushed(_pushed(jax.jit(_curve))), _bend),
    "grad(jvp(jit))": (lambda x: jax.grad(lambda v: _pushed(jax.jit(_curve))(v).sum())(x), _bend),
    "jvp(grad(jit))": (_pushed(jax.grad(lambda v: jax.jit(_curve)(v).sum())), _bend),
}


def watching(*, staged: bool) -> amanda.Tool:
    def look(*gradients: Any) -> None:
        pass

    def analyse(context: amanda.OpContext) -> None:
        routine = amanda.staged(look) if staged else look
        context.insert_before_backward_op(routine, observe=True)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    tool.add_inst_for_op(lambda context: None, backward=True)
    return tool


@pytest.mark.parametrize("name", FORWARD)
@pytest.mark.parametrize("staged", [False, True], ids=["host", "staged"])
def test_forward_mode_runs_under_a_tool_that_looks_at_gradients(name: str, staged: bool) -> None:
    run, by_hand = FORWARD[name]
    plain = run(X)
    with amanda.apply(watching(staged=staged)):
        assert np.allclose(run(X), by_hand(X), rtol=1e-5)
    assert np.array_equal(run(X), plain)


@pytest.mark.parametrize("name", [name for name in FORWARD if name != "jvp(grad(jit))"])
def test_forward_mode_over_edited_gradients_is_refused_by_name(name: str) -> None:
    run, _ = FORWARD[name]
    with amanda.apply(scaling(3.0)), pytest.raises(UnsupportedError, match="forward mode"):
        run(X)


# Threads, versions, coverage.


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.at[jnp.array([0, 1])].add(1.0).at[0].set(5.0),
        lambda x: x.at[0].max(1.0),
        lambda x: lax.reduce(x, 0.0, lambda a, b: jnp.add(a, b) * 1, (0,)),
        lambda x: lax.reduce((x, x), (0.0, 0.0), lambda a, b: (a[0] + b[0], a[1] * b[1]), (0,)),
        lambda x: lax.reduce_window(x, 0.0, lambda a, b: a + b, (2,), (1,), "VALID"),
    ],
)
@pytest.mark.parametrize("jitted", [False, True], ids=["eager", "jit"])
def test_how_an_operator_combines_elements_is_a_part_of_it(
    run: Callable[..., Any], jitted: bool
) -> None:
    calls: list[Any] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: context.insert_after_op(calls.append, outputs=[0]))
    expected = jax.tree.leaves(jax.jit(run)(X))
    with amanda.apply(tool):
        found = jax.tree.leaves((jax.jit(run) if jitted else run)(X))
    assert all(np.allclose(a, b) for a, b in zip(found, expected, strict=True))
    assert calls


def test_other_threads_run_without_tools() -> None:
    contexts: list[amanda.OpContext] = []
    with amanda.apply(looking(contexts)):
        thread = threading.Thread(target=lambda: jax.jit(jnp.cos)(jnp.sin(jnp.ones(2))))
        thread.start()
        thread.join()
    assert contexts == []


def test_a_function_compiled_before_is_instrumented_inside_and_is_not_compiled_again() -> None:
    traces: list[int] = []

    @jax.jit
    def run(x: Any) -> Any:
        traces.append(1)
        return jnp.sin(x)

    x = jnp.ones(3)
    plain = run(x)
    with amanda.apply(scaling(2.0)):
        run(x)
        run(x)
    assert len(traces) == 2
    assert np.array_equal(run(x), plain)
    with amanda.apply(scaling(2.0)):
        run(x)
    assert len(traces) == 3


def test_a_version_that_was_not_tried_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin.amanda_preflight() == []
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: "0.99.1")
    monkeypatch.setattr(FrameworkVersions, "failure", lambda *_: "sin was not seen")
    (finding,) = plugin.amanda_preflight()
    assert (finding.severity, "0.99.1" in finding.message) == ("error", True)
    assert "sin was not seen" in finding.message
    monkeypatch.setattr(FrameworkVersions, "failure", lambda *_: "")
    (finding,) = plugin.amanda_preflight()
    assert (finding.severity, "Self-test: python: passed" in finding.message) == ("warning", True)
    monkeypatch.setattr(FrameworkVersions, "installed", lambda _: None)
    (finding,) = plugin.amanda_preflight()
    assert finding.severity == "error"


def test_the_coverage_says_why() -> None:
    with amanda.apply(amanda.Tool()) as applied:
        gaps = applied.coverage()["jax"]
    assert any("ahead of time" in gap.what for gap in gaps)
    assert all(gap.why for gap in gaps)


def test_discovery_does_not_import_jax() -> None:
    program = (
        "import json, sys; from amanda_core.plugins import discovery; "
        "names = [d.info.name for d in discovery.drivers()]; "
        "print(json.dumps([names, 'jax' in sys.modules, 'numpy' in sys.modules]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    names, has_jax, has_numpy = json.loads(done.stdout)
    assert "jax" in names
    assert not has_jax
    assert not has_numpy
    assert any(driver.info.name == "jax" for driver in discovery.drivers())


@pytest.mark.parametrize(
    "run",
    [
        lambda x: jax.jit(jnp.sin)(x),
        lambda x: jax.grad(jnp.sin)(0.5),
        lambda x: jax.vmap(jnp.sin)(x),
        lambda x: jax.jvp(jnp.sin, (x,), (x,)),
        lambda x: jax.vjp(jnp.sin, x)[1](x),
        lambda x: jax.jit(jax.vmap(jnp.sin))(x),
        lambda x: lax.map(jnp.sin, x),
        lambda x: lax.cond(True, jnp.sin, jnp.cos, x),
        lambda x: jax.checkpoint(jnp.sin)(x),
        lambda x: jax.grad(jax.checkpoint(lax.sin))(0.5),
        lambda x: jax.linearize(jnp.sin, x)[1](x),
    ],
)
def test_a_function_of_jax_that_is_transformed_is_seen_once(run: Callable[[Any], Any]) -> None:
    x = jnp.array([0.3, 0.2])
    seen = [context.op_type for context in contexts_of(lambda: run(x))]
    assert seen.count("sin") == 1
    assert not {"convert_element_type", "mul", "broadcast_in_dim"} & set(seen)


@pytest.mark.parametrize("observe", [False, True])
def test_a_routine_that_selects_no_value_runs_each_time(observe: bool) -> None:
    calls: list[int] = []

    def analyse(context: amanda.OpContext) -> None:
        if context["type"] == "sin":
            context.insert_after_op(lambda: calls.append(1), outputs=[], observe=observe)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    run = jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, v: jnp.sin(v), x))
    with amanda.apply(tool):
        run(jnp.ones(2))
        run(jnp.ones(2))
    assert len(calls) == 6


def test_a_jitted_function_that_ran_before_is_seen_after_a_listener() -> None:
    """Calls that follow a listener are instrumented, whatever it has changed or called."""
    invalidated, called = jax.jit(lambda x: x * 2), jax.jit(lambda x: x + 1)
    invalidated(X)
    seen: list[str] = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.op_type))

    def listen(number: int) -> None:
        if number == 0:
            tool.invalidate()
            called(X)

    tool.add_inst_for_step(end=listen)
    with amanda.apply(tool):
        invalidated(X)  # A jitted call is a step.
        assert seen == ["multiply"]
        invalidated(X)
        assert seen == ["multiply", "multiply"]
        called(X)
    assert seen == ["multiply", "multiply", "add"]
