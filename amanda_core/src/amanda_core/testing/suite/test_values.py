"""The meaning of an op's axes and positions, and edits that change shape or dtype."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.interface.vocabulary import AXES, INPUT_ROLES
from amanda_core.testing.kit.capabilities import needs
from amanda_core.testing.kit.models import Model, Node, Value
from amanda_core.testing.kit.oracle import Edits, evaluate, mapped
from amanda_core.testing.kit.rig import Built, Rig

_SIZES = {"N": 1, "C": 2, "H": 3, "W": 3}
_WEIGHT_SIZES = {"O": 3, "I": 2, "H": 2, "W": 2}


def _without(value: Any, axis: int, index: int) -> Any:
    """Return the value with zeros at one index of an axis."""
    if axis:
        return [_without(item, axis - 1, index) for item in value]
    return [mapped(lambda _: 0.0, v) if i == index else v for i, v in enumerate(value)]


def _without_output(
    rig: Rig, built: Built, common_type: str, index: int
) -> tuple[list[Value], OpContext]:
    """Run with one output channel of the weight set to zero, as the context says where it is."""
    found: list[OpContext] = []

    def analyse(context: OpContext) -> None:
        found.append(context)
        roles = context["input_roles"]
        axis = (context.get("weight_layout") or "IO").index("O")
        position = roles.index("weight" if "weight" in roles else "right")

        def remove(weight: Any) -> Any:
            changed = _without(rig.backend.to_python(weight), axis, index)
            return rig.backend.from_python(changed, like=weight)

        context.insert_before_op(remove, inputs=[position])

    with apply(rig.tool(analyse, common_type)):
        outputs = built.run()
    (context,) = found
    assert set(context["input_roles"]) <= set(INPUT_ROLES)
    assert set(context.get("weight_layout") or "") <= set(AXES)
    return outputs, context


@needs(common_types=("matmul", "tanh"))
def test_the_roles_of_a_matrix_product(rig: Rig) -> None:
    """Name the operands in ``input_roles``, and the weight's axes in ``weight_layout``."""
    built = rig.build("dense")
    outputs, context = _without_output(rig, built, "matmul", 1)
    assert context["input_roles"][:2] in (("left", "right"), ("input", "weight"))
    weight = _without(built.values["w"], 1, 1)
    assert rig.same(outputs, evaluate(built.model, {**built.values, "w": weight}).outputs)


@needs(common_types=("conv2d",))
def test_the_roles_and_layouts_of_a_convolution(rig: Rig) -> None:
    """Name the axes in ``layout`` and ``weight_layout`` in the order that the values have."""
    layout, weight_layout = rig.backend.conv2d_layouts
    model = Model(
        "convolved",
        ("x",),
        ("w",),
        (Node("y", "conv2d", ("x", "w")),),
        ("y",),
        shapes={
            "x": tuple(_SIZES[axis] for axis in layout),
            "w": tuple(_WEIGHT_SIZES[axis] for axis in weight_layout),
        },
    )
    built = rig.build_model(model)
    (plain,) = built.run()
    x, w = (_turned(built.values["x"], layout, "NCHW"), built.values["w"])
    w = _turned(w, weight_layout, "OIHW")
    assert rig.same(_turned(plain, layout, "NCHW"), _convolved(x, w))
    (edited,), context = _without_output(rig, built, "conv2d", 1)
    assert context["input_roles"][:2] == ("input", "weight")
    assert (context["layout"], context["weight_layout"]) == (layout, weight_layout)
    assert rig.same(_turned(edited, layout, "NCHW"), _convolved(x, _without(w, 0, 1)))


def _turned(value: Any, axes: str, wanted: str) -> Any:
    """Return a value with its axes in another order."""
    if not wanted:
        return value
    place = axes.index(wanted[0])
    rest = axes[:place] + axes[place + 1 :]
    return [_turned(item, rest, wanted[1:]) for item in _along(value, place)]


def _along(value: Any, axis: int) -> list[Any]:
    """Return the parts of a value at the indices of an axis."""
    if not axis:
        return list(value)
    return [list(part) for part in zip(*(_along(item, axis - 1) for item in value), strict=True)]


def _convolved(x: Any, w: Any) -> Any:
    """Return the convolution of NCHW with OIHW, without padding."""
    height, width = len(x[0][0]) - len(w[0][0]) + 1, len(x[0][0][0]) - len(w[0][0][0]) + 1
    return [
        [
            [[_at(image, kernel, row, column) for column in range(width)] for row in range(height)]
            for kernel in w
        ]
        for image in x
    ]


def _at(image: Any, kernel: Any, row: int, column: int) -> float:
    total: float = sum(
        factor * image[channel][row + down][column + right]
        for channel, plane in enumerate(kernel)
        for down, line in enumerate(plane)
        for right, factor in enumerate(line)
    )
    return total


def _is_used_or_refused(rig: Rig, routine: Any, expected: Sequence[Value]) -> None:
    built = rig.build("chain")
    with apply(rig.asking("insert_after_op", routine, "mul", outputs=[0])):
        try:
            outputs = built.run()
        except Exception as error:
            notes = [str(error), *getattr(error, "__notes__", ())]
            assert any(routine.__name__ in note for note in notes), notes
        else:
            assert rig.same(outputs, expected)
    assert rig.is_run(built.run(), built)


@needs(optional=True)
def test_a_routine_that_returns_another_shape(rig: Rig) -> None:
    """Use a value of another shape as the framework does, or raise an error with the routine."""
    if len(rig.backend.shape) != 2:
        pytest.skip(f"the values of {rig.backend.title} are not matrices")

    def first_row(value: Any) -> Any:
        return rig.backend.from_python(rig.backend.to_python(value)[:1], like=value)  # type: ignore[index]

    built = rig.build("chain")
    (h,) = [result for name, result in built.expected().results if name == "h"]
    wide: Any = [h[0]] * len(h)  # type: ignore[index, arg-type]
    relu_of_sum = mapped(lambda a, b: max(a + b, 0.0), wide, built.values["b"])
    _is_used_or_refused(rig, first_row, [relu_of_sum])


@needs(optional=True)
def test_a_routine_that_returns_another_type_of_numbers(rig: Rig) -> None:
    """Use a value of another dtype as the framework does, or raise an error with the routine."""
    if rig.backend.of_another_type(rig.backend.from_python(rig.build("chain").inputs[0])) is None:
        pytest.skip(f"the values of {rig.backend.title} are of one type")

    def as_another_type(value: Any) -> Any:
        return rig.backend.of_another_type(rig.backend.call("add", value, value))

    doubled = Edits(after={"h": lambda number: 2 * number})
    _is_used_or_refused(rig, as_another_type, rig.build("chain").expected(doubled).outputs)
