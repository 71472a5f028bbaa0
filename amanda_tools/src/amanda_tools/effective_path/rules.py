"""Rules of effective paths: what each kind of operator takes of its inputs (Qiu et al., 2019).

Works on NumPy arrays, for all samples of a batch at once. NumPy is imported only when needed. Over
400 lines: a list of rules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.effective_path.contributions import Windows, chunks, keep_terms, maximal
from amanda_tools.effective_path.model import WEIGHTED, Extraction, Layer, Node

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
    """Return what a node takes of its inputs.

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
        edges = np.zeros((len(rows), 3), np.int64)
        if number is not None:
            edges[:, 0] = number(columns)
        edges[:, 1], edges[:, 2] = index(rows, columns), outputs[rows]
        self.edges.append(edges)
        self.signs.append(signs[rows])
        if weight is not None:
            samples = edges[:, 2] // max(1, self.given.output[0].size)
            size = self.given.node.arguments["weight"].size
            self.weights.append(samples * size + weight(rows, columns))
        if threshold is not None:
            self.thresholds.append(np.stack([outputs, threshold], axis=1))

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
            lambda rows, columns, place=place: place[rows] * width + columns,
            outputs,
            kept.signs,
            weight=lambda rows, columns, neuron=neuron: numbers[neuron[rows], columns],
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
            weight=lambda rows, columns, channels=channels: numbers[channels[rows], columns],
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
        taken.add(kept.mask, lambda rows, columns, own=own: own[rows, columns], outputs, kept.signs)
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
    taken.add(
        kept.mask, lambda rows, places: own[rows, places], chosen, kept.signs, lambda places: places
    )
    return taken.result(len(columns))


def _passed(given: Given, transform: Callable[[Any, int], Any]) -> Result:
    numbers = range(len(given.inputs))
    return Result(
        [transform(given.mask, number) for number in numbers],
        [transform(given.signs, number) for number in numbers],
    )


def _concat(given: Given) -> Result:
    import numpy as np

    axis = given.node.arguments["axis"]
    ends = np.cumsum([value.shape[axis] for value in given.inputs])
    return _passed(given, lambda array, number: np.split(array, ends[:-1], axis=axis)[number])


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
    "concat": _concat,
    "pad": _pad,
    "reshape": _reshape,
    "slice": _slice,
    "transpose": _transpose,
    "batch_norm": _batch_norm,
}
