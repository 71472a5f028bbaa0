"""Rules of effective paths: what each kind of operator takes of its inputs (Qiu et al., 2019).

Works on NumPy arrays, for all samples of a batch at once. NumPy is imported only when needed. Over
400 lines: a list of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from amanda_tools.effective_path.contributions import Kept, chunks, keep_terms, maximal, turned
from amanda_tools.effective_path.model import WEIGHTED, Extraction, Layer, Node
from amanda_tools.effective_path.slices import per_head
from amanda_tools.effective_path.windows import Covered, Windows

__all__ = ["Result", "apply"]

#: Largest number of elements of the windows that are gathered at once.
_ELEMENTS = 1 << 22


@dataclass
class Result:
    """Result of a rule.

    Attributes:
        masks: For each input, which of its elements are in the path.
        signs: For each input, -1 where the sign of an element is to be flipped, otherwise 1.
        layer: The part of the operator in the path, for operators that select.
    """

    masks: list[Any]
    signs: list[Any]
    layer: Layer | None = None


@dataclass
class Given:
    node: Node
    inputs: list[Any]
    output: Any
    mask: Any
    signs: Any
    how: Extraction
    phi: float | None


def apply(
    node: Node,
    values: Mapping[int, Any],
    mask: Any,
    signs: Any,
    how: Extraction,
    phi: float | None,
) -> Result:
    """Return the inputs of a node that determine the chosen elements of its output.

    Args:
        node: The node.
        values: Number -> value.
        mask: Which elements of its output are in the path.
        signs: -1 where the sign of an output is to be flipped, otherwise 1.
        how: Options of the extraction.
        phi: Keep terms of at least this value; None to keep a share of their sum.
    """
    inputs = [values[number] for number in node.inputs]
    given = Given(node, inputs, values[node.output], mask, signs, how, phi)
    return _RULES[node.kind](given)


class _Taken:
    """Collects what an operator takes, output by output, in ascending order."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.edges: list[Any] = []
        self.signs: list[Any] = []
        self.weights: list[Any] = []
        self.thresholds: list[Any] = []

    def add(
        self,
        kept: Kept,
        index: Callable[[Any, Any], Any],
        outputs: Any,
        number: Any = 0,
        weight: Callable[[Any, Any], Any] | None = None,
    ) -> None:
        """Add some outputs with their terms.

        Args:
            kept: Which terms are kept, and the sign that each output passes on to them.
            index: Returns the indices in the input of the terms at these rows and columns.
            outputs: Index of each output.
            number: Number of the input of each kept term.
            weight: Returns the indices of the weights of the terms at these rows and columns.
        """
        import numpy as np

        rows, columns = kept.rows, kept.columns
        own = outputs[rows]
        self.put(number, index(rows, columns), own, kept.signs[rows])
        if weight is not None:
            samples = own // max(1, self.given.output[0].size)
            size = self.given.node.arguments["weight"].size
            self.weights.append(samples * size + weight(rows, columns))
            self.thresholds.append(np.stack([outputs, kept.threshold]))

    def put(self, number: Any, indices: Any, outputs: Any, signs: Any) -> None:
        """Add edges: from these indices in the inputs of these numbers to these outputs."""
        import numpy as np

        self.edges.append((np.broadcast_to(number, len(indices)), indices, outputs))
        self.signs.append(np.broadcast_to(signs, len(indices)))

    def result(self, terms: int) -> Result:
        """Return everything that was added; each output has this many terms."""
        import numpy as np

        given = self.given
        none = np.empty(0, np.int64)
        edges = [np.concatenate([none, *part]) for part in zip(*self.edges, strict=True)]
        edges = edges or [none, none, none]
        signs = np.concatenate([np.empty(0, np.int8), *self.signs])
        masks, flips = [], []
        for number, value in enumerate(given.inputs):
            indices, own_signs = edges[1], signs
            if len(given.inputs) > 1:
                own = np.flatnonzero(edges[0] == number)
                indices, own_signs = indices[own], signs[own]
            mask, sign = np.zeros(value.size, bool), np.ones(value.size, np.int8)
            mask[indices] = True
            # If several outputs take one input, the first, which is written last, determines its
            # sign.
            if (own_signs < 0).any():
                sign[indices[::-1]] = own_signs[::-1]
            masks.append(mask.reshape(value.shape))
            flips.append(sign.reshape(value.shape))
        points = dict(zip(given.node.inputs, masks, strict=True))
        layer = Layer(points, edges, given.output[0].size * terms)
        if given.node.kind in WEIGHTED:
            taken = np.unique(np.concatenate([none, *self.weights]))
            size = max(1, given.node.arguments["weight"].size)
            layer.weights = np.stack(np.divmod(taken, size), axis=1)
            self._measure(layer)
        return Result(masks, flips, layer)

    def _measure(self, layer: Layer) -> None:
        import numpy as np

        output, samples = self.given.output, len(self.given.output)
        counts = self.given.mask.reshape(samples, -1).sum(axis=1)
        sizes = np.abs(output.reshape(samples, -1))
        layer.output_threshold = np.array(
            [
                np.partition(row, place)[place]
                for row, place in zip(sizes, sizes.shape[1] - np.maximum(counts, 1), strict=True)
            ]
        )
        outputs, found = np.concatenate([np.empty((2, 0)), *self.thresholds], axis=1)
        there = ~np.isnan(found)
        owners = outputs[there].astype(np.int64) // max(1, output[0].size)
        with np.errstate(invalid="ignore"):
            layer.term_threshold = np.bincount(
                owners, weights=found[there], minlength=samples
            ) / np.bincount(owners, minlength=samples)


def _indices(value: Any) -> Any:
    import numpy as np

    return np.arange(value.size).reshape(value.shape)


def _broadcast_indices(value: Any, shape: Sequence[int]) -> Any:
    """Return, for each element of this shape, the index of the element that is broadcast to it."""
    import numpy as np

    if value.shape == shape:
        return np.arange(value.size)
    return np.broadcast_to(_indices(value), shape).reshape(-1)


def _steps(shape: Sequence[int]) -> list[int]:
    """Return the distance of neighbours along each axis of an array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _at(indices: Any, rows: Any, columns: Any) -> Any:
    return indices[rows, columns]


def _keep(
    given: Given, terms: Any, outputs: Any, signs: Any, covered: Covered | None = None
) -> Kept:
    """Keep the terms that determine these outputs; modify the terms in place."""
    import numpy as np

    rows = np.flatnonzero(turned(outputs, signs))
    if len(rows):
        terms[rows] *= -1.0
    valid, number = (None, None) if covered is None else (covered.valid, covered.number)
    phi = given.phi if given.node.kind in WEIGHTED else None
    return keep_terms(terms, valid, signs, given.how.theta, phi, number)


class _Weight:
    """A weight as a matrix, with a row for each neuron or output channel.

    Args:
        weight: The weight.
        rows: Its axes whose elements are rows.
        columns: Its axes whose elements are columns.
    """

    def __init__(self, weight: Any, rows: Sequence[int], columns: Sequence[int]) -> None:
        steps, axes = _steps(weight.shape), [*rows, *columns]
        self._rows = _offsets(weight.shape, steps, rows)
        self._columns = _offsets(weight.shape, steps, columns)
        self._matrix = weight.transpose(axes).reshape(len(self._rows), len(self._columns))
        self.shape: tuple[int, int] = self._matrix.shape

    def times(self, rows: Any, values: Any) -> Any:
        """Multiply values in place with these rows, and return them."""
        import numpy as np

        return np.multiply(values, self._matrix.take(rows, axis=0), out=values)

    def of(self, numbers: Any) -> Callable[[Any, Any], Any]:
        """Return a function that returns the indices in the weight of terms of these rows."""
        return lambda rows, columns: self._rows[numbers[rows]] + self._columns[columns]


def _offsets(shape: Sequence[int], steps: Sequence[int], axes: Sequence[int]) -> Any:
    """Return the distances from the first element of all elements along these axes."""
    import numpy as np

    found: Any = np.zeros(1, np.int64)
    for axis in axes:
        found = (found[:, None] + np.arange(shape[axis]) * steps[axis]).reshape(-1)
    return found


def _linear(given: Given) -> Result:
    """Apply the rule of a product with ``weight`` over the last axis; ``layout`` orders its axes I,
    O.
    """
    import numpy as np

    (x,), layout = given.inputs, given.node.arguments["layout"]
    weight = _Weight(given.node.arguments["weight"], [layout.index("O")], [layout.index("I")])
    neurons, width = weight.shape
    rows, taken = x.reshape(-1, width), _Taken(given)
    chosen, signs = np.flatnonzero(given.mask), given.signs.reshape(-1)
    for part in chunks(len(chosen), width):
        outputs = chosen[part]
        place, neuron = np.divmod(outputs, neurons)
        terms = weight.times(neuron, rows.take(place, axis=0))
        kept = _keep(given, terms, given.output.reshape(-1)[outputs], signs[outputs])
        index = lambda rows, columns, place=place: place[rows] * width + columns  # noqa: E731
        taken.add(kept, index, outputs, weight=weight.of(neuron))
    return taken.result(width)


def _conv(given: Given) -> Result:
    """Apply the rule of a convolution; arguments are those of `_windows`, ``weight`` and its
    layout.
    """
    arguments, taken = given.node.arguments, _Taken(given)
    weight, axes = arguments["weight"], arguments["weight_layout"]
    # A depthwise weight has a multiplier M, whose channels are consecutive.
    order = [axes.index(axis) for axis in _first(axes, "IM" if "M" in axes else "OI")]
    depth = 1 if "M" in axes else weight.shape[order[1]]
    kernel = [weight.shape[axis] for axis in order[2:]]
    matrix = _Weight(weight, order[: 1 + ("M" in axes)], order[1 + ("M" in axes) :])
    channels_in = given.inputs[0].shape[arguments["layout"].index("C")]
    per_group = matrix.shape[0] * depth // channels_in
    windows, chosen = _windows(given, kernel), _Chosen(given)
    covering = _Covering(windows, chosen, per_group, depth, matrix.shape[1])
    for part in chunks(len(chosen.outputs), matrix.shape[1]):
        channels, covered = chosen.channels[part], covering.of(part)
        terms = matrix.times(channels, covered.values)
        kept = _keep(given, terms, chosen.values[part], chosen.signs[part], covered)
        taken.add(kept, covered.index, chosen.outputs[part], weight=matrix.of(channels))
    return taken.result(matrix.shape[1])


class _Covering:
    """Windows of input that the outputs of a convolution cover; channels share their windows.

    Windows are gathered once, unless they are too large together, or hardly shared.
    """

    def __init__(
        self, windows: Windows, chosen: _Chosen, per_group: int, depth: int, width: int
    ) -> None:
        self._windows, self._chosen, self._depth = windows, chosen, depth
        self._first = chosen.channels // per_group * depth
        owners, self._numbers = windows.distinct(chosen.samples, self._first, chosen.places)
        fits = len(owners) * width <= _ELEMENTS and len(owners) * 2 <= len(self._numbers)
        self._shared = self._of(owners) if fits else None

    def of(self, part: slice) -> Covered:
        """Return what a part of the outputs covers."""
        return self._of(part) if self._shared is None else self._shared.of(self._numbers[part])

    def _of(self, chosen: Any) -> Covered:
        places = [axis[chosen] for axis in self._chosen.places]
        samples, first = self._chosen.samples[chosen], self._first[chosen]
        return self._windows.of(samples, first, places, self._depth)


def _pool(given: Given) -> Result:
    import numpy as np

    taken, chosen = _Taken(given), _Chosen(given)
    kernel, how = given.node.arguments["kernel"], given.how
    windows = _windows(given, kernel)
    for part in chunks(len(chosen.outputs), math.prod(kernel)):
        places, signs = [axis[part] for axis in chosen.places], chosen.signs[part]
        covered = windows.of(chosen.samples[part], chosen.channels[part], places)
        if given.node.kind == "max_pool":
            mask = maximal(covered.values, covered.valid, not how.zeros)
            rows, columns = np.nonzero(mask)
            kept = Kept(rows, columns, signs)
        else:
            kept = _keep(given, covered.values, chosen.values[part], signs, covered)
        taken.add(kept, covered.index, chosen.outputs[part])
    return taken.result(math.prod(kernel))


class _Chosen:
    """The outputs of an operator on images that are in the path, ordered by the axes N, C and
    space.

    The order is the same in every layout, because the sign that several outputs pass on to one
    input depends on it.
    """

    def __init__(self, given: Given) -> None:
        import numpy as np

        layout = given.node.arguments["layout"]
        order = [layout.index(axis) for axis in _first(layout, "NC")]
        mask, steps = given.mask.transpose(order), _steps(given.output.shape)
        places = np.unravel_index(np.flatnonzero(mask), mask.shape)
        self.samples, self.channels, *self.places = places
        #: Index of each in the output's memory layout.
        self.outputs: Any = sum(
            place * steps[axis] for place, axis in zip(places, order, strict=True)
        )
        self.values = given.output.reshape(-1)[self.outputs]
        self.signs = given.signs.reshape(-1)[self.outputs]


def _windows(given: Given, kernel: Sequence[int]) -> Windows:
    """Return the windows; arguments are ``layout`` and, per axis, ``stride``, ``before``,
    ``dilation``.
    """
    (x,), arguments = given.inputs, given.node.arguments
    layout = arguments["layout"]
    order = [layout.index(axis) for axis in _first(layout, "NC")]
    ones = (1,) * len(kernel)
    return Windows(
        x.transpose(order),
        [_steps(x.shape)[axis] for axis in order],
        [given.output.shape[axis] for axis in order[2:]],
        kernel,
        arguments.get("stride", ones),
        arguments.get("before", (0,) * len(kernel)),
        arguments.get("dilation", ones),
        arguments.get("adaptive", False),
    )


def _first(layout: str, leading: str) -> str:
    return leading + "".join(axis for axis in layout if axis not in leading)


def _mean(given: Given) -> Result:
    """Apply the rule of a mean or sum over ``axes``."""
    import numpy as np

    (x,) = given.inputs
    axes = sorted(axis % x.ndim for axis in given.node.arguments["axes"])
    others = [axis for axis in range(x.ndim) if axis not in axes]
    width = math.prod([x.shape[axis] for axis in axes])
    indices = _indices(x).transpose(*others, *axes).reshape(-1, width)
    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    signs, values = given.signs.reshape(-1), given.output.reshape(-1)
    for part in chunks(len(chosen), width):
        outputs = chosen[part]
        own = indices[outputs]
        terms = x.reshape(-1)[own]
        kept = _keep(given, terms, values[outputs], signs[outputs])
        taken.add(kept, partial(_at, own), outputs)
    return taken.result(width)


def _add(given: Given) -> Result:
    """Apply the rule of a broadcasting sum of values, each times its factor in ``factors``."""
    import numpy as np

    factors = given.node.arguments.get("factors") or [1.0] * len(given.inputs)
    shape = given.output.shape
    chosen = np.flatnonzero(given.mask)
    columns = [_broadcast_indices(value, shape)[chosen] for value in given.inputs]
    terms = np.stack(
        [
            factor * value.reshape(-1)[column]
            for factor, value, column in zip(factors, given.inputs, columns, strict=True)
        ],
        axis=1,
    )
    taken = _Taken(given)
    kept = _keep(given, terms, given.output.reshape(-1)[chosen], given.signs.reshape(-1)[chosen])
    taken.add(kept, partial(_at, np.stack(columns, axis=1)), chosen, kept.columns)
    return taken.result(len(columns))


class _Product:
    """Rows of factors of a product of two arrays over the last axis and the last but one.

    Attributes:
        left: For each row of an output, the indices of the factors on the left.
        right: For each column of an output, the indices of the factors on the right.
    """

    def __init__(self, left: Any, right: Any, shape: Sequence[int]) -> None:
        import numpy as np

        *lead, rows, columns = shape
        width = left.shape[-1]
        lefts = np.broadcast_to(_indices(left), (*lead, rows, width))
        rights = np.broadcast_to(_indices(right), (*lead, width, columns)).swapaxes(-1, -2)
        self.left, self.right = lefts.reshape(-1, width), rights.reshape(-1, width)
        self._flat = left.reshape(-1), right.reshape(-1)
        self._rows, self._columns = rows, columns

    def factors(self, outputs: Any) -> tuple[Any, Any, Any]:
        """Return the indices of the factors on both sides, and their products, for each output."""
        row, column = outputs // self._columns, outputs % self._columns
        left = self.left[row]
        right = self.right[row // self._rows * self._columns + column]
        return left, right, self._flat[0][left] * self._flat[1][right]


def _product(given: Given) -> Result:
    """Apply the rule of a product of two values; a term takes both its factors."""
    import numpy as np

    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    left, right = given.inputs
    product = _Product(left, right, given.output.shape)
    width = product.left.shape[1]
    signs, values = given.signs.reshape(-1), given.output.reshape(-1)
    for part in chunks(len(chosen), width):
        outputs = chosen[part]
        left, right, terms = product.factors(outputs)
        kept = _keep(given, terms, values[outputs], signs[outputs])
        rows, columns = kept.rows, kept.columns
        for number, indices in enumerate((left, right)):
            taken.put(number, indices[rows, columns], outputs[rows], kept.signs[rows])
    return taken.result(2 * width)


def _gate(given: Given) -> Result:
    """Apply the rule of an elementwise product of two values, which takes both."""
    import numpy as np

    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    shape = given.output.shape
    sides = [_broadcast_indices(x, shape)[chosen] for x in given.inputs]
    values = given.output.reshape(-1)[chosen]
    signs = given.signs.reshape(-1)[chosen]
    kept = _keep(given, values[:, None].copy(), values, signs)
    for number, indices in enumerate(sides):
        taken.put(number, indices, chosen, kept.signs)
    return taken.result(2)


def _attention(given: Given) -> Result:
    """Apply the rules of the two products and the softmax of an attention in one operator.

    ``weights`` are the attention weights. An edge goes from a query, key or value to an output.
    """
    import numpy as np

    query, key, value = given.inputs
    weights = given.node.arguments["weights"]
    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    signs, values = given.signs.reshape(-1), given.output.reshape(-1)
    # Indices into `key` and `value` themselves, which heads may share; `key` is transposed below.
    keys = per_head(_indices(key), query).swapaxes(-1, -2).reshape(-1)
    values_of = per_head(_indices(value), query).reshape(-1)
    key, value = per_head(key, query), per_head(value, query)
    after = _Product(weights, value, given.output.shape)
    pairs: list[Any] = []
    for part in chunks(len(chosen), after.left.shape[1]):
        outputs = chosen[part]
        left, right, terms = after.factors(outputs)
        kept = _keep(given, terms, values[outputs], signs[outputs])
        rows, columns = kept.rows, kept.columns
        taken.put(2, values_of[right[rows, columns]], outputs[rows], kept.signs[rows])
        pairs.append(np.stack([left[rows, columns], outputs[rows]]))
    places, outputs = np.concatenate([*pairs, np.empty((2, 0), np.int64)], axis=1)
    scores = query @ key.swapaxes(-1, -2)
    before = _Product(query, key.swapaxes(-1, -2), scores.shape)
    numbers, position = np.unique(places, return_inverse=True)
    size, none = given.output.size, np.empty(0, np.int64)
    edges: list[list[Any]] = [[], []]
    for part in chunks(len(numbers), before.left.shape[1]):
        left, right, terms = before.factors(numbers[part])
        ones = np.ones(len(left), np.int8)
        kept = _keep(given, terms, scores.reshape(-1)[numbers[part]], ones)
        mask = np.zeros(terms.shape, bool)
        mask[kept.rows, kept.columns] = True
        # Every output that took a weight takes the terms of its score.
        own = np.flatnonzero((position >= part.start) & (position < part.stop))
        pair, columns = np.nonzero(mask[position[own] - part.start])
        rows = position[own][pair] - part.start
        made = outputs[own][pair]
        edges[0].append(left[rows, columns] * size + made)
        edges[1].append(keys[right[rows, columns]] * size + made)
    # Several scores of an output may take the same element of a query or key.
    for number, found in enumerate(edges):
        taken.put(number, *np.divmod(np.unique(np.concatenate([*found, none])), size), 1)
    return taken.result(after.left.shape[1] * (1 + 2 * before.left.shape[1]))


def _passed(given: Given, transform: Callable[[Any, int], Any]) -> Result:
    numbers = range(len(given.inputs))
    return Result(
        [transform(given.mask, number) for number in numbers],
        [transform(given.signs, number) for number in numbers],
    )


def _concat(given: Given) -> Result:
    """Apply the rule of a concatenation; ``parts`` has the start of each input along ``axis``."""
    import numpy as np

    axis, starts = given.node.arguments["axis"], given.node.arguments["parts"]

    def part(array: Any, number: int) -> Any:
        length = given.inputs[number].shape[axis]
        return array.take(np.arange(starts[number], starts[number] + length), axis=axis)

    return _passed(given, part)


def _pad(given: Given) -> Result:
    """Apply the rule of padding; ``before`` has the padding before each axis."""
    (x,) = given.inputs
    before = given.node.arguments["before"]
    inside = tuple(slice(start, start + size) for start, size in zip(before, x.shape, strict=True))
    return _passed(given, lambda array, number: array[inside])


def _reshape(given: Given) -> Result:
    return _passed(given, lambda array, number: array.reshape(given.inputs[0].shape))


def _slice(given: Given) -> Result:
    """Apply the rule of a slice; ``places`` has the flat input index of each output element."""
    import numpy as np

    (x,), taken = given.inputs, given.node.arguments["places"][given.mask]
    mask, signs = np.zeros(x.size, bool), np.ones(x.size, np.int8)
    mask[taken], signs[taken] = True, given.signs[given.mask]
    return Result([mask.reshape(x.shape)], [signs.reshape(x.shape)])


def _transpose(given: Given) -> Result:
    import numpy as np

    back = np.argsort(given.node.arguments["axes"])
    return _passed(given, lambda array, number: array.transpose(back))


def _batch_norm(given: Given) -> Result:
    """Pass on what is in the path, with the sign of input times output."""
    import numpy as np

    turned = np.sign(given.inputs[0]) * np.sign(given.output) < 0
    signs = np.where(turned & given.mask, -1, 1).astype(np.int8)
    return Result([given.mask], [signs])


_RULES: Mapping[str, Callable[[Given], Result]] = {
    "linear": _linear,
    "conv": _conv,
    "max_pool": _pool,
    "avg_pool": _pool,
    "mean": _mean,
    "add": _add,
    "product": _product,
    "gate": _gate,
    "attention": _attention,
    "concat": _concat,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "transpose": _transpose,
    "batch_norm": _batch_norm,
}
