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

from amanda_tools.effective_path.contributions import Windows, chunks, keep_terms, maximal
from amanda_tools.effective_path.model import WEIGHTED, Extraction, Layer, Node
from amanda_tools.effective_path.slices import per_head

__all__ = ["Result", "apply"]


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
        mask: Any,
        index: Callable[[Any, Any], Any],
        outputs: Any,
        signs: Any,
        number: Callable[[Any], Any] | None = None,
        weight: Callable[[Any, Any], Any] | None = None,
        threshold: Any = None,
    ) -> None:
        """Add some outputs with their terms.

        Args:
            mask: Which terms are kept, of shape (outputs, terms).
            index: Returns the indices in the input of the terms at these rows and columns.
            outputs: Index of each output.
            signs: Sign that each output passes on to its kept terms.
            number: Returns the numbers of the inputs of these columns; None for the first input.
            weight: Returns the indices of the weights of the terms at these rows and columns.
            threshold: Least term that is kept for each output.
        """
        import numpy as np

        rows, columns = np.divmod(np.flatnonzero(mask), mask.shape[1])
        first = 0 if number is None else number(columns)
        self.put(first, index(rows, columns), outputs[rows], signs[rows])
        if weight is not None:
            samples = outputs[rows] // max(1, self.given.output[0].size)
            size = self.given.node.arguments["weight"].size
            self.weights.append(samples * size + weight(rows, columns))
        if threshold is not None:
            self.thresholds.append(np.stack([outputs, threshold], axis=1))

    def put(self, number: Any, indices: Any, outputs: Any, signs: Any) -> None:
        """Add edges: from these indices in the inputs of these numbers to these outputs."""
        import numpy as np

        edges = np.empty((len(indices), 3), np.int64)
        edges[:, 0], edges[:, 1], edges[:, 2] = number, indices, outputs
        self.edges.append(edges)
        self.signs.append(np.broadcast_to(signs, len(indices)))

    def result(self, terms: int) -> Result:
        """Return everything that was added; each output has this many terms."""
        import numpy as np

        given = self.given
        edges = np.concatenate([*self.edges, np.empty((0, 3), np.int64)])
        signs = np.concatenate([*self.signs, np.empty(0, np.int8)])
        masks, flips = [], []
        for number, value in enumerate(given.inputs):
            indices, own_signs = edges[:, 1], signs
            if len(given.inputs) > 1:
                own = np.flatnonzero(edges[:, 0] == number)
                indices, own_signs = indices[own], signs[own]
            mask, sign = np.zeros(value.size, bool), np.ones(value.size, np.int8)
            # If several outputs take one input, the first, which is written last, determines its
            # sign.
            mask[indices], sign[indices[::-1]] = True, own_signs[::-1]
            masks.append(mask.reshape(value.shape))
            flips.append(sign.reshape(value.shape))
        points = dict(zip(given.node.inputs, masks, strict=True))
        layer = Layer(points, edges, given.output[0].size * terms)
        if given.node.kind in WEIGHTED:
            taken = np.unique(np.concatenate([*self.weights, np.empty(0, np.int64)]))
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
        found = np.concatenate([*self.thresholds, np.empty((0, 2))])
        found = found[~np.isnan(found[:, 1])]
        owners = found[:, 0].astype(np.int64) // max(1, output[0].size)
        with np.errstate(invalid="ignore"):
            layer.term_threshold = np.bincount(
                owners, weights=found[:, 1], minlength=samples
            ) / np.bincount(owners, minlength=samples)


def _indices(value: Any) -> Any:
    import numpy as np

    return np.arange(value.size).reshape(value.shape)


def _steps(shape: Sequence[int]) -> list[int]:
    """Return the distance of neighbours along each axis of an array."""
    return [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]


def _at(indices: Any, rows: Any, columns: Any) -> Any:
    return indices[rows, columns]


def _at_place(places: Any, width: int, rows: Any, columns: Any) -> Any:
    return places[rows] * width + columns


def _numbered(numbers: Any, owners: Any, rows: Any, columns: Any) -> Any:
    """Return the numbers of the weights that belong to the owners of these rows."""
    return numbers[owners[rows], columns]


def _linear(given: Given) -> Result:
    """Apply the rule of a product with ``weight`` over the last axis; ``layout`` orders its axes I,
    O.
    """
    import numpy as np

    (x,), weight = given.inputs, given.node.arguments["weight"]
    numbers = _indices(weight)
    if given.node.arguments["layout"] == "IO":
        weight, numbers = weight.T, numbers.T
    width = x.shape[-1]
    rows, taken = x.reshape(-1, width), _Taken(given)
    chosen, signs = np.flatnonzero(given.mask), given.signs.reshape(-1)
    for part in chunks(len(chosen), width):
        outputs = chosen[part]
        place, neuron = np.divmod(outputs, len(weight))
        terms = weight[neuron] * rows[place]
        kept = keep_terms(
            terms,
            None,
            given.output.reshape(-1)[outputs],
            signs[outputs],
            given.how.theta,
            given.phi,
        )
        taken.add(
            kept.mask,
            partial(_at_place, place, width),
            outputs,
            kept.signs,
            weight=partial(_numbered, numbers, neuron),
            threshold=kept.threshold,
        )
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
    numbers = _indices(weight).transpose(order).reshape(-1, depth * math.prod(kernel))
    weight = weight.transpose(order).reshape(numbers.shape)
    channels_in = given.inputs[0].shape[arguments["layout"].index("C")]
    per_group = len(weight) * depth // channels_in
    windows, chosen = _windows(given, kernel), _Chosen(given)
    for part in chunks(len(chosen.outputs), weight.shape[1]):
        samples, channels, places = chosen.of(part)
        covered = windows.of(samples, channels // per_group * depth, places, depth)
        kept = keep_terms(
            covered.values * weight[channels],
            covered.valid,
            chosen.values[part],
            chosen.signs[part],
            given.how.theta,
            given.phi,
        )
        taken.add(
            kept.mask,
            covered.index,
            chosen.outputs[part],
            kept.signs,
            weight=partial(_numbered, numbers, channels),
            threshold=kept.threshold,
        )
    return taken.result(weight.shape[1])


def _pool(given: Given) -> Result:
    taken, chosen = _Taken(given), _Chosen(given)
    kernel, how = given.node.arguments["kernel"], given.how
    windows = _windows(given, kernel)
    for part in chunks(len(chosen.outputs), math.prod(kernel)):
        samples, channels, places = chosen.of(part)
        covered, signs = windows.of(samples, channels, places), chosen.signs[part]
        values, valid = covered.values, covered.valid
        if given.node.kind == "max_pool":
            mask = maximal(values, valid, not how.zeros)
        else:
            kept = keep_terms(values, valid, chosen.values[part], signs, how.theta, None)
            mask, signs = kept.mask, kept.signs
        taken.add(mask, covered.index, chosen.outputs[part], signs)
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
        self._places = np.unravel_index(np.flatnonzero(mask), mask.shape)
        #: Index of each in the output's memory layout.
        self.outputs = sum(
            place * steps[axis] for place, axis in zip(self._places, order, strict=True)
        )
        self.values = given.output.reshape(-1)[self.outputs]
        self.signs = given.signs.reshape(-1)[self.outputs]

    def of(self, part: slice) -> tuple[Any, Any, list[Any]]:
        """Return the samples, channels and places of a part of them."""
        samples, channels, *places = (axis[part] for axis in self._places)
        return samples, channels, places


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
        kept = keep_terms(terms, None, values[outputs], signs[outputs], given.how.theta, None)
        taken.add(kept.mask, partial(_at, own), outputs, kept.signs)
    return taken.result(width)


def _add(given: Given) -> Result:
    """Apply the rule of a broadcasting sum of values, each times its factor in ``factors``."""
    import numpy as np

    factors = given.node.arguments.get("factors") or [1.0] * len(given.inputs)
    shape = given.output.shape
    chosen = np.flatnonzero(given.mask)
    columns = [
        np.broadcast_to(_indices(value), shape).reshape(-1)[chosen] for value in given.inputs
    ]
    terms = np.stack(
        [
            factor * value.reshape(-1)[column]
            for factor, value, column in zip(factors, given.inputs, columns, strict=True)
        ],
        axis=1,
    )
    taken = _Taken(given)
    kept = keep_terms(
        terms,
        None,
        given.output.reshape(-1)[chosen],
        given.signs.reshape(-1)[chosen],
        given.how.theta,
        None,
    )
    own = np.stack(columns, axis=1)
    taken.add(kept.mask, partial(_at, own), chosen, kept.signs, lambda places: places)
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
        kept = keep_terms(terms, None, values[outputs], signs[outputs], given.how.theta, None)
        rows, columns = np.nonzero(kept.mask)
        for number, indices in enumerate((left, right)):
            taken.put(number, indices[rows, columns], outputs[rows], kept.signs[rows])
    return taken.result(2 * width)


def _gate(given: Given) -> Result:
    """Apply the rule of an elementwise product of two values, which takes both."""
    import numpy as np

    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    shape = given.output.shape
    sides = [np.broadcast_to(_indices(x), shape).reshape(-1)[chosen] for x in given.inputs]
    values = given.output.reshape(-1)[chosen]
    signs = given.signs.reshape(-1)[chosen]
    kept = keep_terms(values[:, None].copy(), None, values, signs, given.how.theta, None)
    for number, indices in enumerate(sides):
        taken.put(number, indices, chosen, kept.signs)
    return taken.result(2)


def _attention(given: Given) -> Result:
    """Apply the rules of the two products and the softmax of an attention in one operator.

    ``weights`` are the attention weights. An edge goes from a query, key or value to an output.
    """
    import numpy as np

    query, key, value = given.inputs
    weights, theta = given.node.arguments["weights"], given.how.theta
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
        kept = keep_terms(terms, None, values[outputs], signs[outputs], theta, None)
        rows, columns = np.nonzero(kept.mask)
        taken.put(2, values_of[right[rows, columns]], outputs[rows], kept.signs[rows])
        pairs.append(np.stack([left[rows, columns], outputs[rows]]))
    places, outputs = np.concatenate([*pairs, np.empty((2, 0), np.int64)], axis=1)
    scores = query @ key.swapaxes(-1, -2)
    before = _Product(query, key.swapaxes(-1, -2), scores.shape)
    numbers, position = np.unique(places, return_inverse=True)
    for part in chunks(len(numbers), before.left.shape[1]):
        left, right, terms = before.factors(numbers[part])
        ones = np.ones(len(left), np.int8)
        kept = keep_terms(terms, None, scores.reshape(-1)[numbers[part]], ones, theta, None)
        # Every output that took a weight takes the terms of its score.
        own = np.flatnonzero((position >= part.start) & (position < part.stop))
        pair, columns = np.nonzero(kept.mask[position[own] - part.start])
        rows = position[own][pair] - part.start
        found = np.stack([left[rows, columns], keys[right[rows, columns]], outputs[own][pair]])
        for number in (0, 1):
            edges = np.unique(found[[number, 2]], axis=1)
            taken.put(number, edges[0], edges[1], 1)
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
