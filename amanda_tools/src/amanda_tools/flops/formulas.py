"""Cost of operators by common type: multiply-accumulates and single operations.

Defines the conventions of counting, which `docs/tools/flops.md` explains. Imports no framework:
sizes go in, numbers come out. Operators without a common type are in `operators`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_core import OpContext
from amanda_tools.kit.operators.entries import words
from amanda_tools.kit.tensors.types import Size

__all__ = [
    "FREE",
    "MATMUL",
    "NORM",
    "REDUCTIONS",
    "UNCOUNTED",
    "Count",
    "Formula",
    "attention_gradients",
    "attention_parts",
    "contraction",
    "counted",
    "elementwise",
    "formula_of",
    "packed_attention",
    "packed_projections",
]


Count = Callable[[Sequence[Any], Sequence[Any]], int]


@dataclass(frozen=True)
class Formula:
    """Cost of one execution of an operator.

    Attributes:
        kind: ``matmul``, ``norm`` or ``elementwise``.
        inputs: Positions of the inputs whose sizes the formula needs.
        count: ``(sizes of these inputs, sizes of the outputs) -> number``. The number is of
            multiply-accumulates, or of single operations if the kind is ``elementwise``.
        operands: Positions whose gradients have a cost; None for all.
        backward: ``(sizes of the inputs, of the outputs, gradients) -> number``. A gradient that
            was not computed is None. Without this function each gradient costs as much as the
            operator.
        each: Cost of a single backward operator in executions of the operator, for frameworks that
            have one backward operator for each gradient.
        whole: ``(sizes of the inputs, of the outputs) -> number`` for all gradients together, where
            those of single operands do not say what is computed. It comes before `backward`.
    """

    kind: str
    inputs: tuple[int, ...]
    count: Count
    operands: tuple[int, ...] | None
    backward: Callable[[Sequence[Any], Sequence[Any], Sequence[Any]], int] | None = None
    each: int = 1
    whole: Callable[[Sequence[Any], Sequence[Any]], int] | None = None


def counted(count: Callable[..., int], *sizes: Any) -> int | str:
    """Return the number of a formula, or the reason why it has none for these sizes."""
    try:
        return count(*sizes)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        # Counting never stops a program.
        return f"the formula does not take these shapes: {error}"[:200]


# Common types by how they are counted. A type in none of these sets is elementwise.

#: Counted as the multiply-accumulates of a product.
MATMUL = words(
    "linear matmul grouped_matmul outer bilinear einsum conv1d conv2d conv3d conv_transpose1d "
    "conv_transpose2d conv_transpose3d rnn lstm gru attention cdist"
)
#: One multiply-accumulate for each element: times a scale, plus a shift.
NORM = words("batch_norm layer_norm group_norm instance_norm rms_norm weight_norm")
#: One operation for each element of the input rather than of the output.
REDUCTIONS = words(
    "sum mean prod var std max min argmax argmin any all logsumexp norm count_nonzero "
    "segment_reduce embedding_bag cross_entropy nll_loss binary_cross_entropy "
    "binary_cross_entropy_with_logits mse_loss l1_loss smooth_l1_loss huber_loss kl_div "
    "cosine_similarity max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d "
    "adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d adaptive_max_pool1d "
    "adaptive_max_pool2d adaptive_max_pool3d"
)
#: No arithmetic: values are moved, selected, sorted, created or converted.
FREE = words(
    "embedding unfold reshape transpose concat stack split slice assign_slice assign gather "
    "scatter expand tile repeat squeeze unsqueeze flip roll tril triu diag pad cast bitcast "
    "identity "
    "depth_to_space space_to_depth channel_shuffle one_hot constant full empty range eye meshgrid "
    "random topk sort argsort nonzero unique histogram where masked_fill real imag complex conj "
    "accumulate_grad reduce_grad all_gather all_to_all broadcast send recv barrier"
)
#: Arithmetic without a formula here: reported as not counted.
UNCOUNTED = words("inverse solve det cholesky qr svd eigh fft ctc_loss all_reduce reduce_scatter")


def formula_of(word: str, context: OpContext) -> Formula | str | None:
    """Return the formula for a common type, None if it costs nothing, or the reason why there is
    none.

    Args:
        word: A common operator type.
        context: Context of the operator, with its inputs.
    """
    if word in FREE:
        return None
    if word in UNCOUNTED:
        return f"no formula for {word}"
    if word in NORM:
        # A backward operator computes the gradients of input, scale and shift.
        return Formula("norm", (_role(context, "input", 0),), _of_input, None, each=3)
    if word not in MATMUL:
        if word in REDUCTIONS:
            return Formula("elementwise", (0,), _of_input, None)
        return elementwise()
    if word.startswith("conv_transpose"):
        return _convolution(context, transposed=True)
    if word.startswith("conv"):
        return _convolution(context, transposed=False)
    return _FORMULAS[word](context)


def elementwise() -> Formula:
    """Return the formula that counts one operation for each element of the output."""
    return Formula("elementwise", (), _of_output, None)


def _of_input(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    return _elements(inputs[0])


def _of_output(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
    return _elements(outputs[0]) if outputs else 0


def _elements(size: Any) -> int:
    if isinstance(size, Size):
        return size.elements
    return sum(_elements(item) for item in size or ())


def _role(context: OpContext, role: str, default: int) -> int:
    roles: tuple[str, ...] = context.get("input_roles", ())
    return roles.index(role) if role in roles else default


# Products.


def _linear(context: OpContext) -> Formula:
    positions = (_role(context, "input", 0), _role(context, "weight", 1))

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return int(outputs[0].elements) * int(inputs[0][-1])

    return Formula("matmul", positions, count, positions)


def _matmul(context: OpContext) -> Formula | str:
    if isinstance((context.get_inputs() or (None,))[0], (list, tuple)):
        return "a chain of products, whose order is not known"
    positions = (_role(context, "left", 0), _role(context, "right", 1))
    attrs = context.attrs
    turned = any(attrs.get(name) for name in ("transpose_a", "adj_x"))
    axes = None if context.facts is None else context.facts.contraction(context)

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        left, right = inputs
        if left.stored is not None:
            return int(left.stored * (right[-1] if len(right) > 1 else 1))
        if right.stored is not None:
            return int(right.stored * (left[-2] if len(left) > 1 else 1))
        if len(left) == len(right) == 2 and len(outputs[0]) == 3:
            return int(left.elements * right[-1])  # Grouped along the summed axis.
        if axes is not None and axes.places == positions:
            term, other = axes.terms
            if (len(term), len(axes.result)) == (len(left), len(outputs[0])):
                summed = set(term) & set(other) - set(axes.result)
                sizes = [int(n) for axis, n in zip(term, left, strict=True) if axis in summed]
                return int(outputs[0].elements) * math.prod(sizes)
        # Length of the sum that each element of the output takes.
        length = left[-2] if turned and len(left) > 1 else left[-1]
        if len(left) == len(right) == 3 and len(outputs[0]) == 2:
            length *= left[0]  # Summed over the batch as well.
        return int(outputs[0].elements) * int(length)

    return Formula("matmul", positions, count, positions)


def _outer(context: OpContext) -> Formula:
    return Formula("matmul", (), _of_output, (0, 1))


def _bilinear(context: OpContext) -> Formula:
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        # First the left input times the weight, then each row of the product times the right input.
        out, left, right = inputs[1]
        rows = inputs[0].elements // left
        return int(rows * out * right * (left + 1))

    def backward(inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> int:
        return count(inputs, outputs) * sum(gradient is not None for gradient in gradients)

    return Formula("matmul", (0, 2), count, (0, 1, 2), backward)


def _cdist(context: OpContext) -> Formula:
    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return int(outputs[0].elements * inputs[0][-1])

    return Formula("matmul", (0,), count, (0, 1))


# Convolution.


def _convolution(context: OpContext, transposed: bool) -> Formula | str:
    layout = context.get("weight_layout")
    if layout is None:
        return "the layout of the weight is not known"
    positions = (_role(context, "input", 0), _role(context, "weight", 1))

    # Two axes of a depthwise weight make up the channels.
    depthwise = "M" in layout
    if transposed:
        channels = "OM" if depthwise else "I"
    else:
        channels = "IM" if depthwise else "O"

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        # Each element of the output (transposed: of the input) costs one multiply-accumulate for
        # each element of its channel's filter.
        axes = zip(inputs[1], layout, strict=True)
        each = math.prod(length for length, axis in axes if axis not in channels)
        return int((inputs[0] if transposed else outputs[0]).elements * each)

    return Formula("matmul", positions, count, positions)


# Contractions in index notation.


def _einsum(context: OpContext) -> Formula | str:
    equation = context.attrs.get("equation")
    places: tuple[int, ...] = (0,)
    inputs = context.get_inputs() or ()
    if inputs and isinstance(inputs[0], (str, bytes)):
        equation, places = inputs[0], (1,)
    if equation is None:
        axes = None if context.facts is None else context.facts.contraction(context)
        if axes is None or not all(isinstance(place, int) for place in axes.places):
            return "the equation is not known"
        places = tuple(place for place in axes.places if isinstance(place, int))
        equation = f"{','.join(axes.terms)}->{axes.result}"
    text = equation.decode() if isinstance(equation, bytes) else str(equation)

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return sum(contraction(text, _operands(inputs)))

    def backward(inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> int:
        wanted = [gradient is not None for gradient in _operands(gradients)]
        # A product has a gradient for each of its two operands, if it is needed.
        return sum(
            cost * (wanted[index] + any(wanted[:index]))
            for index, cost in enumerate(contraction(text, _operands(inputs)), 1)
        )

    return Formula("matmul", places, count, places, backward)


def _operands(values: Sequence[Any]) -> Sequence[Any]:
    """Return the operands of a product, which may be inputs of their own or one list of them."""
    is_list = len(values) == 1 and not isinstance(values[0], Size)
    return values[0] if is_list and isinstance(values[0], (list, tuple)) else values


def contraction(equation: str, sizes: Sequence[Size]) -> list[int]:
    """Return the multiply-accumulates of each product of an einsum, from left to right.

    Args:
        equation: The equation, such as ``bij,bjk->bik``; may contain ellipses.
        sizes: Sizes of the operands.

    >>> contraction("ij,jk,kl->il", [Size((2, 3)), Size((3, 4)), Size((4, 5))])
    [24, 40]
    """
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms: list[list[str]] = []
    lengths: dict[str, int] = {}
    for term, size in zip(left.split(","), sizes, strict=True):
        head, dots, tail = term.partition("...")
        free = len(size) - len(head) - len(tail)
        # The axes of an ellipsis are aligned on the right.
        names = [*head, *(f".{free - i}" for i in range(free) if dots), *tail]
        terms.append(names)
        for name, length in zip(names, size, strict=True):
            lengths[name] = max(length, lengths.get(name, 1))
    every = [name for term in terms for name in term]
    if arrow:
        head, dots, tail = right.partition("...")
        kept = {*head, *tail, *(name for name in every if dots and name[0] == ".")}
    else:
        kept = {name for name in every if every.count(name) == 1 or name[0] == "."}
    costs, done = [], set(terms[0])
    for index, names in enumerate(terms[1:], 1):
        later = kept.union(*terms[index + 1 :])
        # An axis that only one operand has, and that is not needed later, is summed beforehand.
        axes = (done & set(names)) | ((done | set(names)) & later)
        costs.append(math.prod(lengths[axis] for axis in axes))
        done = axes & later
    return costs


# Recurrence and attention.


def _recurrent(context: OpContext) -> Formula | str:
    names = context.input_names
    cell = "w_ih" in names
    if not cell and "params" not in names:
        return "the weights of the recurrent layer are not known"
    weights = ("w_ih", "w_hh") if cell else ("params",)
    packed = "batch_sizes" in names
    values = context.get_inputs() or ()
    both = "bidirectional" in names and bool(values and values[names.index("bidirectional")])
    directions = 2 if both else 1
    used = (0, *map(names.index, weights))

    def matrices(inputs: Sequence[Any]) -> list[Size]:
        found = inputs[1:] if cell else inputs[1]
        return [size for size in found if isinstance(size, Size) and len(size) == 2]

    def steps(inputs: Sequence[Any]) -> int:
        data = inputs[0]
        return int(data[0] if packed else math.prod(data[:-1]))

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return steps(inputs) * sum(size.elements for size in matrices(inputs))

    def backward(inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]) -> int:
        whole = count(inputs, outputs)
        by_weights = any(_present(gradient) for gradient in gradients[1:])
        by_states = whole
        if gradients[0] is None:  # The gradient of the first layer's input is not computed.
            width = inputs[0][-1]
            first = matrices(inputs)[0]
            by_states -= steps(inputs) * first[0] * width * directions
        return by_states + whole * by_weights

    return Formula("matmul", used, count, used, backward)


def _present(gradient: Any) -> bool:
    if isinstance(gradient, (list, tuple)):
        return any(item is not None for item in gradient)
    return gradient is not None


def _attention(context: OpContext) -> Formula:
    positions = tuple(
        _role(context, role, default) for default, role in enumerate(("query", "key", "value"))
    )

    def count(inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        return sum(attention_parts(inputs, outputs))

    return Formula("matmul", positions, count, positions, attention_gradients)


def attention_parts(inputs: Sequence[Any], outputs: Sequence[Any]) -> tuple[int, int]:
    """Return the multiply-accumulates of the scores and of the weighted values of attention."""
    query, key, value = inputs
    # The number of heads is the query's, even if several share a key.
    pairs = math.prod(outputs[0][:-1]) * key[-2]
    return pairs * query[-1], pairs * value[-1]


def attention_gradients(
    inputs: Sequence[Any], outputs: Sequence[Any], gradients: Sequence[Any]
) -> int:
    """Return the multiply-accumulates of those gradients of attention that are computed."""
    scores, values = attention_parts(inputs, outputs)
    query, key, value = (gradient is not None for gradient in gradients)
    # Query and key share the gradient of the attention weights, a product with the values.
    return scores * (query + key) + values * (value + (query or key))


def packed_attention(query: Any, key: Any, value: Any) -> int:
    """Return the multiply-accumulates of all heads, each of which has a part of the width."""
    pairs = math.prod(query[:-1]) * key[-2]
    return int(pairs * (query[-1] + value[-1]))


def packed_projections(query: Any, key: Any, value: Any, into: Any, out: Any) -> int:
    """Return those of the projections: of query, key and value by one weight, and of the result."""
    third = into.elements // 3
    rows = sum(math.prod(size[:-1]) for size in (query, key, value))
    return int(rows * third + math.prod(query[:-1]) * out.elements)


_FORMULAS: Mapping[str, Callable[[OpContext], Formula | str]] = {
    "linear": _linear,
    "matmul": _matmul,
    "grouped_matmul": _matmul,
    "outer": _outer,
    "bilinear": _bilinear,
    "cdist": _cdist,
    "einsum": _einsum,
    "rnn": _recurrent,
    "lstm": _recurrent,
    "gru": _recurrent,
    "attention": _attention,
}
