"""The axes of JAX's products: what `Facts.contraction` returns.

Owns the reading of the program of a function that JAX itself jitted, such as `jnp.einsum`.
"""

from __future__ import annotations

import itertools
import string
from collections.abc import Sequence
from typing import Any

from amanda_core.driver_kit import OpContext, contraction_of_axes
from amanda_core.interface import Contraction

__all__ = ["contraction", "permutation"]

#: Primitives whose result has the axes of the operand.
_SAME = frozenset({"convert_element_type", "copy", "copy_p", "stop_gradient", "neg"})
#: The parameter that holds the program of a call.
_CALLS = "jaxpr"


def contraction(context: OpContext) -> Contraction | None:
    """Return the axes of a product's operands; None for other operators."""
    if context["type"] not in ("matmul", "einsum", "grouped_matmul"):
        return None
    attrs, inputs = context.attrs, context.get_inputs() or []
    if (ragged := attrs.get("ragged_dot_dimension_numbers")) is not None:
        ranks = [len(inputs[0].shape), len(inputs[1].shape)]
        summed, batched = ragged.dot_dimension_numbers
        found = contraction_of_axes((0, 1), ranks, summed, batched)
        groups = "".join(found.terms[1][axis] for axis in ragged.rhs_group_dimensions)
        return found._replace(groups=groups)
    if (numbers := attrs.get("dimension_numbers")) is not None:
        ranks = [len(inputs[0].shape), len(inputs[1].shape)]
        return contraction_of_axes((0, 1), ranks, *numbers)
    return _of_program(attrs[_CALLS].jaxpr) if _CALLS in attrs else None


def permutation(context: OpContext) -> tuple[int, ...] | None:
    """Return the operand's axis that each axis of a transposition's result is, if it is known."""
    attrs = context.attrs
    if "permutation" in attrs or _CALLS not in attrs:
        return attrs.get("permutation")
    program, same = attrs[_CALLS].jaxpr, _Names()
    terms = [same.new(len(variable.aval.shape)) for variable in program.invars]
    results = _run(program, terms, same)
    if results is None or len(terms) != 1 or len(results) != 1:
        return None
    return tuple(terms[0].index(number) for number in results[0])


def part(context: OpContext) -> list[int | slice] | None:
    """Return an index along each axis of the operand that gives the result, if it is known."""
    attrs, operand = context.attrs, next(iter(context.get_inputs() or ()))
    if "dimensions" in attrs:
        dropped = {axis % operand.ndim for axis in attrs["dimensions"]}
        return [0 if axis in dropped else slice(None) for axis in range(operand.ndim)]
    if "start_indices" not in attrs or "limit_indices" not in attrs:
        return None
    bounds = attrs["start_indices"], attrs["limit_indices"]
    steps = attrs["strides"] or (1,) * operand.ndim
    return list(map(slice, *bounds, steps))


def _of_program(program: Any) -> Contraction | None:
    """Return the contraction of a program of products and transpositions; None for any other.

    The operands are in the order in which the program multiplies them.
    """
    same = _Names()
    terms = [same.new(len(variable.aval.shape)) for variable in program.invars]
    results = _run(program, terms, same)
    if results is None or len(results) != 1 or same.count > len(string.ascii_letters):
        return None
    names = ["".join(string.ascii_letters[same.of(n)] for n in term) for term in (*terms, *results)]
    places = _order(program)
    return Contraction(places, tuple(names[place] for place in places), names[-1])


def _order(program: Any) -> tuple[int, ...]:
    """Return the positions of a program's arguments in the order of their first use."""
    used = [id(one) for equation in program.eqns for one in equation.invars]
    given = [id(variable) for variable in program.invars]
    known = [place for place in dict.fromkeys(used) if place in given]
    return tuple(given.index(one) for one in dict.fromkeys((*known, *given)))


class _Names:
    """Numbers of axes, some of which are the same axis."""

    def __init__(self) -> None:
        self._numbers, self._same = itertools.count(), dict[int, int]()
        self.count = 0

    def new(self, rank: int) -> list[int]:
        """Return numbers of axes that are not known to be the same as others."""
        self.count += rank
        return list(itertools.islice(self._numbers, rank))

    def of(self, number: int) -> int:
        """Return the number that stands for an axis and all that were joined with it."""
        while number in self._same:
            number = self._same[number]
        return number

    def join(self, first: int, second: int) -> None:
        """Note that two axes run together."""
        one, other = self.of(first), self.of(second)
        if one != other:
            self._same[other] = one


def _run(program: Any, given: Sequence[list[int]], same: _Names) -> list[list[int]] | None:
    """Return the axes of a program's results; None if it has operators that are not known."""
    known: dict[Any, list[int]] = dict(zip(program.invars, given, strict=True))
    products: set[Any] = set()
    for equation in program.eqns:
        earlier = [one for one in equation.invars if not hasattr(one, "val") and one in products]
        if len(earlier) > 1:
            return None  # No order of the operands tells what is multiplied with what.
        if earlier or equation.primitive.name in ("dot_general", "mul"):
            products.update(equation.outvars)
        operands = [
            same.new(len(one.aval.shape)) if hasattr(one, "val") else known.get(one)
            for one in equation.invars
        ]
        results = None if None in operands else _step(equation, operands, same)
        if results is None:
            return None
        known.update(zip(equation.outvars, results, strict=True))
    found = [known.get(one) if not hasattr(one, "val") else None for one in program.outvars]
    return None if None in found else [one for one in found if one is not None]


def _step(equation: Any, operands: Sequence[Any], same: _Names) -> list[list[int]] | None:
    name, params = equation.primitive.name, equation.params
    if name in _SAME:
        return [operands[0]]
    if name == "transpose":
        return [[operands[0][axis] for axis in params["permutation"]]]
    if name == "reduce_sum":
        return [[n for axis, n in enumerate(operands[0]) if axis not in params["axes"]]]
    if name == "mul" and len(operands[0]) == len(operands[1]):
        for one, other in zip(*operands, strict=True):
            same.join(one, other)
        return [operands[0]]
    if name == "dot_general":
        (summed, batched), (left, right) = params["dimension_numbers"], operands
        for one, other in (*zip(*summed, strict=True), *zip(*batched, strict=True)):
            same.join(left[one], right[other])
        gone = [{*summed[side], *batched[side]} for side in (0, 1)]
        rest = [
            [n for axis, n in enumerate(own) if axis not in gone[side]]
            for side, own in enumerate((left, right))
        ]
        return [[left[axis] for axis in batched[0]] + rest[0] + rest[1]]
    if name in ("jit", "pjit") and _CALLS in params:
        return _run(params[_CALLS].jaxpr, operands, same)
    return None
