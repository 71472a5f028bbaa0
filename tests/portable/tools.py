"""Tools for every backend from one source, written with `amanda` and common types only.

Imports no framework. Routines compute with Python's operators, which tensors of all frameworks
support. Masks are created with NumPy, once, in the analysis.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

import amanda
from amanda_core import OpContext

Array = npt.NDArray[Any]
Routine = Callable[..., Any]

#: Words of the operators that multiply by a weight.
WITH_WEIGHTS = ("conv2d", "linear", "matmul")


# Routines. Each is there twice: called by Python at each execution, and traced into the graph where
# there is one. They are pure, so that both do the same.


def multiply(value: Any, factor: Any) -> Any:
    """Return the product."""
    return value * factor


def swish(x: Any) -> Any:
    """Return ``x * sigmoid(x)``."""
    return x / (1.0 + math.e ** (-x))


@amanda.staged
def multiply_in_graph(value: Any, factor: Any) -> Any:
    """Return the product."""
    return multiply(value, factor)


@amanda.staged
def swish_in_graph(x: Any) -> Any:
    """Return ``x * sigmoid(x)``."""
    return swish(x)


_IN_GRAPH: dict[Routine, Routine] = {multiply: multiply_in_graph, swish: swish_in_graph}


def routine(function: Routine, staged: bool) -> Routine:
    """Return a routine of this file, or its version that is traced into graphs."""
    return _IN_GRAPH[function] if staged else function


# Weights.


def weight_position(context: OpContext) -> int | None:
    """Return the position of an op's weight, or None if it has none."""
    roles: tuple[str, ...] = context.get("input_roles", ())
    for role in ("weight", "right"):
        if role in roles:
            return roles.index(role)
    return None


def canonical_axes(layout: str) -> list[int]:
    """Return the order of axes that converts a weight from any layout to out, in, then space."""
    return [layout.index(axis) for axis in sorted(layout, key="OIMDHW".index)]


def magnitude_mask(weight: Array, layout: str, sparsity: float) -> Array:
    """Return 0 for the smallest magnitudes and 1 elsewhere, in the layout of `weight`.

    Among equal magnitudes the first in canonical order become 0, so that the mask does not depend
    on the layout.
    """
    axes = canonical_axes(layout)
    canonical = weight.transpose(axes)
    mask = np.ones(canonical.size, weight.dtype)
    smallest = np.argsort(np.abs(canonical).ravel(), kind="stable")
    mask[smallest[: int(mask.size * sparsity)]] = 0
    return mask.reshape(canonical.shape).transpose(np.argsort(axes))


# Tools.


class Count(amanda.Tool):
    """Counts executions of operators by common type.

    Attributes:
        forward: Type -> number of executions.
        backward: Type -> number of gradients that arrived at the operators.
        raw: Type such as ``conv2d_backward`` -> number of executions of backward operators, of
            which one operator may have several.
    """

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words
        self.forward: collections.Counter[str] = collections.Counter()
        self.backward: collections.Counter[str] = collections.Counter()
        self.raw: collections.Counter[str] = collections.Counter()
        self.add_inst_for_op(self.analyse)
        self.add_inst_for_op(self.analyse_backward, backward=True)

    def analyse(self, context: OpContext) -> None:
        word = context["type"]
        if word in self.words:
            context.insert_before_op(self.count, counter=self.forward, word=word)
            if context.supports("aligned_gradients"):  # Some frameworks only infer.
                context.insert_before_backward_op(
                    self.count, grad_outputs=[0], counter=self.backward, word=word
                )

    def analyse_backward(self, context: OpContext) -> None:
        word = context["backward_type"]
        if word is not None and word.removesuffix("_backward") in self.words:
            context.insert_after_backward_op(self.count, counter=self.raw, word=word)

    def count(self, *values: Any, counter: collections.Counter[str], word: str) -> None:
        counter[word] += 1


class MagnitudePrune(amanda.Tool):
    """Prunes weights by magnitude, and their gradients by the same masks.

    Attributes:
        masks: One mask for each weight, in order of analysis and in canonical layout.
        layouts: The layout of each weight.
    """

    def __init__(self, sparsity: float, gradients: bool = True, staged: bool = False) -> None:
        super().__init__()
        self.sparsity = sparsity
        self.gradients = gradients
        self.multiply = routine(multiply, staged)
        self.masks: list[Array] = []
        self.layouts: list[str] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] not in WITH_WEIGHTS:
            return
        position = weight_position(context)
        if position is None:
            return
        weight, layout = context.value(position), context.get("weight_layout")
        if weight is None or layout is None:
            return  # A product of two activations.
        facts = context.facts
        assert facts is not None
        mask = magnitude_mask(np.asarray(facts.values(weight)), layout, self.sparsity)
        self.masks.append(mask.transpose(canonical_axes(layout)))
        self.layouts.append(layout)
        factor = facts.tensor(mask, weight)
        context.insert_before_op(self.multiply, inputs=[position], factor=factor)
        if self.gradients and context.supports("aligned_gradients"):
            context.insert_after_backward_op(self.multiply, grad_inputs=[position], factor=factor)


class ScaleGradient(amanda.Tool):
    """Scales the gradients that arrive at the outputs of operators of one type."""

    def __init__(self, word: str, factor: float, staged: bool = False) -> None:
        super().__init__()
        self.word, self.factor = word, factor
        self.multiply = routine(multiply, staged)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] == self.word and context.supports("aligned_gradients"):
            context.insert_before_backward_op(self.multiply, grad_outputs=[0], factor=self.factor)


class ReplaceActivation(amanda.Tool):
    """Replaces operators of one type by ``x * sigmoid(x)``, forward and backward."""

    def __init__(self, word: str = "relu", staged: bool = False) -> None:
        super().__init__()
        self.word = word
        self.swish = routine(swish, staged)
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] == self.word:
            context.replace_op(self.swish, inputs=[0])


class OperatorTrace(amanda.Tool):
    """Records the order in which operators run.

    Attributes:
        executed: Type and op id of each execution.
    """

    def __init__(self, *words: str) -> None:
        super().__init__()
        self.words = words
        self.executed: list[tuple[str, int]] = []
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: OpContext) -> None:
        if context["type"] in self.words:
            context.insert_before_op(
                self.record, inputs=[0], word=context["type"], number=context.get_op_id()
            )

    def record(self, value: Any, word: str, number: int) -> None:
        self.executed.append((word, number))
