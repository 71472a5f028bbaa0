"""Capabilities ``replace``, ``autodiff`` and ``staged``: routines that compute in the framework."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from amanda_core.engine.action import staged
from amanda_core.engine.activation import apply, autodiff_enabled
from amanda_core.engine.context import OpContext
from amanda_core.errors import ReplacementConflictError, RoutineResultError
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.models import MODELS, Model, Node
from amanda_core.testing.kit.oracle import Edits, evaluate
from amanda_core.testing.kit.rig import Rig

_CHAIN = MODELS["chain"]
#: The chain with a square in place of its relu.
_SQUARED = _CHAIN.with_nodes(*_CHAIN.nodes[:2], Node("y", "mul", ("a", "a")))
#: The chain with a square ahead of its relu.
_SQUARED_BEFORE = _CHAIN.with_nodes(
    *_CHAIN.nodes[:2], Node("s", "mul", ("a", "a")), Node("y", "relu", ("s",))
)


def _square(rig: Rig) -> Any:
    def square(value: Any) -> Any:
        return rig.backend.call("mul", value, value)

    return square


def _assert_is(rig: Rig, model: Model, found: Any) -> None:
    built = rig.build("chain")
    expected = built.expected(model=model)
    assert rig.same(found.outputs, expected.outputs)
    for name, gradient in expected.gradients.items():
        assert rig.same(found.gradients[name], gradient), name


@needs("replace")
def test_an_op_is_replaced(rig: Rig) -> None:
    """Run `plan.replacement` on the op's inputs, and use its result as the op's.

    Call `plan.replacement.replace(values)` after the steps before the op, if the plan has one.
    """
    built = rig.build("chain")
    with apply(rig.asking("replace_op", _square(rig), "relu", inputs=[0])):
        first, second = built.run(), built.run()
    assert rig.same(first, evaluate(_SQUARED, built.values).outputs)
    assert second == first
    assert rig.is_run(built.run(), built)


@needs("replace")
def test_a_replacement_runs_between_the_insertions(rig: Rig) -> None:
    """Run a replacement on what insertions before the op returned, and pass on its result."""
    built = rig.build("chain")
    with apply(
        rig.asking("insert_after_op", rig.edit(lambda n: n + 1), "relu", outputs=[0]),
        rig.asking("replace_op", _square(rig), "relu", inputs=[0]),
        rig.asking("insert_before_op", rig.edit(lambda n: n - 1), "relu", inputs=[0]),
    ):
        outputs = built.run()
    one = {name: _constant(rig, number) for name, number in (("plus", 1.0), ("minus", -1.0))}
    model = replace(
        _CHAIN,
        nodes=(
            *_CHAIN.nodes[:2],
            Node("l", "add", ("a", "minus")),
            Node("s", "mul", ("l", "l")),
            Node("y", "add", ("s", "plus")),
        ),
    )
    assert rig.same(outputs, evaluate(model, {**built.values, **one}).outputs)


def _constant(rig: Rig, number: float) -> Any:
    value: Any = number
    for length in reversed(rig.backend.shape):
        value = [value] * length
    return value


@needs("replace")
def test_a_replacement_that_returns_none_is_an_error(rig: Rig) -> None:
    """Let the core's error pass, which `replace` raises."""
    built = rig.build("chain")
    with (
        apply(rig.asking("replace_op", lambda value: None, "relu", inputs=[0])),
        pytest.raises(RoutineResultError),
    ):
        built.run()
    assert rig.is_run(built.run(), built)


@needs("replace")
def test_two_replacements_are_an_error(rig: Rig) -> None:
    """Let the core's error pass, which the analysis raises."""
    built = rig.build("chain")
    with (
        apply(
            rig.asking("replace_op", _square(rig), "relu", inputs=[0]),
            rig.asking("replace_op", _square(rig), "relu", inputs=[0]),
        ),
        pytest.raises(ReplacementConflictError),
    ):
        built.run()
    assert rig.is_run(built.run(), built)


@needs("gradients", "replace")
def test_a_replacement_is_differentiated_as_written(rig: Rig) -> None:
    """Run a replacement where the framework records, so that gradients flow through it."""
    built = rig.build("chain")
    with apply(rig.asking("replace_op", _square(rig), "relu", inputs=[0])):
        found = built.gradients()
    _assert_is(rig, _SQUARED, found)


# Capability ``autodiff``.


@needs("gradients", "autodiff")
def test_inserted_code_is_not_differentiated(rig: Rig) -> None:
    """Without autodiff_enabled, send gradients straight through inserted code."""
    built = rig.build("chain")

    def square(number: float) -> float:
        return number * number

    with apply(rig.asking("insert_before_op", _square(rig), "relu", inputs=[0])):
        found = built.gradients()
    expected = built.expected(Edits(before={("y", 0): square}))
    assert rig.same(found.outputs, expected.outputs)
    assert rig.same(found.gradients["w"], expected.gradients["w"])


@needs("gradients", "autodiff")
def test_inserted_code_is_differentiated_on_request(rig: Rig) -> None:
    """Differentiate inserted code if `step.action.autodiff` says so."""
    built = rig.build("chain")

    def analyse(context: OpContext) -> None:
        with autodiff_enabled():
            context.insert_before_op(_square(rig), inputs=[0])

    with apply(rig.tool(analyse, "relu")):
        found = built.gradients()
    _assert_is(rig, _SQUARED_BEFORE, found)


# Capability ``staged``.


def _staged_square(rig: Rig) -> Any:
    multiply = rig.backend.functions["mul"]

    @staged
    def square(value: Any) -> Any:
        return multiply(value, value)

    return square


@needs("staged")
def test_a_staged_routine_gives_the_same_as_any_other(rig: Rig) -> None:
    """Embed a routine only if `step.action.staged` allows it; results are the same."""
    results = []
    for routine in (_square(rig), _staged_square(rig)):
        built = rig.build("chain")
        with apply(rig.asking("insert_after_op", routine, "add", outputs=[0])):
            results.append(built.run())
            assert built.run() == results[-1]
        assert rig.is_run(built.run(), built)
    assert rig.same(results[0], evaluate(_SQUARED_BEFORE, built.values).outputs)
    assert rig.same(results[1], results[0])


@needs("replace", "staged")
def test_a_staged_replacement(rig: Rig) -> None:
    """Accept a staged replacement, too."""
    built = rig.build("chain")
    with apply(rig.asking("replace_op", _staged_square(rig), "relu", inputs=[0])):
        outputs = built.run()
    assert rig.same(outputs, evaluate(_SQUARED, built.values).outputs)


@needs("gradients", "aligned_gradients", "staged")
def test_a_staged_routine_on_a_gradient(rig: Rig) -> None:
    """Edit gradients alike by staged and by other routines."""
    results = []
    for routine in (_square(rig), _staged_square(rig)):
        built = rig.build("chain")
        with apply(rig.asking("insert_before_backward_op", routine, "add", grad_outputs=[0])):
            results.append(built.gradients())
    arriving = built.expected().arriving["a"]
    assert rig.same(results[0].gradients["b"], _squares(arriving))
    for name, gradient in results[0].gradients.items():
        assert rig.same(results[1].gradients[name], gradient), name


def _squares(value: Any) -> Any:
    return [_squares(item) for item in value] if isinstance(value, list) else value * value
