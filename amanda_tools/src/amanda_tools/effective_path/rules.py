"""Rules of effective paths: what each kind of operator takes of its inputs (Qiu et al., 2019).

Works on NumPy arrays, for all samples of a batch at once. NumPy is imported only when needed. Over
400 lines: a list of rules.
"""

from __future__ import annotations

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
        number: Any,
        indices: Any,
        outputs: Any,
        mask: Any,
        signs: Any,
        weights: Any = None,
        threshold: Any = None,
    ) -> None:
        """Add some outputs with their terms.

        Args:
            number: Number of the input of the terms: one for all, or one for each term.
            indices: Indices in that input, of shape (outputs, terms).
            outputs: Index of each output.
            mask: Which terms are kept.
            signs: Sign that each output passes on to its kept terms.
            weights: Index of the weight of each term.
            threshold: Least term that is kept for each output.
        """
        import numpy as np

        rows, columns = np.nonzero(mask)
        numbers = np.broadcast_to(number, mask.shape)[rows, columns]
        found = [numbers, indices[rows, columns], outputs[rows]]
        self.edges.append(np.stack(found, axis=1).astype(np.int64))
        self.signs.append(signs[rows])
        if weights is not None:
            samples = outputs[rows] // max(1, self.given.output[0].size)
            pairs = np.stack([samples, weights[rows, columns]], axis=1)
            self.weights.append(np.unique(pairs, axis=0))
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
            own = edges[:, 0] == number
            # If several outputs take one input, the first determines its sign.
            indices, first = np.unique(edges[own, 1], return_index=True)
            mask, sign = np.zeros(value.size, bool), np.ones(value.size, np.int8)
            mask[indices], sign[indices] = True, signs[own][first]
            masks.append(mask.reshape(value.shape))
            flips.append(sign.reshape(value.shape))
        points = dict(zip(given.node.inputs, masks, strict=True))
        layer = Layer(points, edges, given.output[0].size * terms)
        if given.node.kind in WEIGHTED:
            layer.weights = np.unique(
                np.concatenate([*self.weights, np.empty((0, 2), np.int64)]), axis=0
            )
            self._measure(layer)
        return Result(masks, flips, layer)

    def _measure(self, layer: Layer) -> None:
        import numpy as np

        output, samples = self.given.output, len(self.given.output)
        counts = self.given.mask.reshape(samples, -1).sum(axis=1)
        ordered = np.sort(np.abs(output.reshape(samples, -1)), axis=1)[:, ::-1]
        layer.output_threshold = ordered[np.arange(samples), np.maximum(counts, 1) - 1]
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
        indices = place[:, None] * width + np.arange(width)
        taken.add(0, indices, outputs, kept.mask, kept.signs, numbers[neuron], kept.threshold)
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
    numbers = _indices(weight).transpose(order).reshape(-1, depth * _size(kernel))
    weight = weight.transpose(order).reshape(numbers.shape)
    channels_in = given.inputs[0].shape[arguments["layout"].index("C")]
    per_group = len(weight) * depth // channels_in
    windows, chosen = _windows(given, kernel), _Chosen(given)
    for part in chunks(len(chosen.outputs), weight.shape[1]):
        samples, channels, places = chosen.of(part)
        covered = windows.of(samples, channels // per_group * depth, places, depth)
        valid = covered.indices >= 0
        kept = keep_terms(
            covered.values * weight[channels],
            valid,
            chosen.values[part],
            chosen.signs[part],
            given.how.theta,
            given.phi,
        )
        taken.add(
            0,
            covered.indices,
            chosen.outputs[part],
            kept.mask,
            kept.signs,
            numbers[channels],
            kept.threshold,
        )
    return taken.result(weight.shape[1])


def _pool(given: Given) -> Result:
    taken, chosen = _Taken(given), _Chosen(given)
    kernel, how = given.node.arguments["kernel"], given.how
    windows = _windows(given, kernel)
    for part in chunks(len(chosen.outputs), _size(kernel)):
        samples, channels, places = chosen.of(part)
        covered, signs = windows.of(samples, channels, places), chosen.signs[part]
        values, valid = covered.values, covered.indices >= 0
        if given.node.kind == "max_pool":
            mask = maximal(values, valid, not how.zeros)
        else:
            kept = keep_terms(values, valid, chosen.values[part], signs, how.theta, None)
            mask, signs = kept.mask, kept.signs
        taken.add(0, covered.indices, chosen.outputs[part], mask, signs)
    return taken.result(_size(kernel))


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
        mask = given.mask.transpose(order)
        self._places = np.nonzero(mask)
        #: Index of each in the output's memory layout.
        self.outputs = _indices(given.output).transpose(order)[self._places]
        self.values = given.output.transpose(order)[self._places]
        self.signs = given.signs.transpose(order)[self._places]

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
        _indices(x).transpose(order),
        [given.output.shape[axis] for axis in order[2:]],
        kernel,
        arguments.get("stride", ones),
        arguments.get("before", (0,) * len(kernel)),
        arguments.get("dilation", ones),
        arguments.get("adaptive", False),
    )


def _first(layout: str, leading: str) -> str:
    return leading + "".join(axis for axis in layout if axis not in leading)


def _size(kernel: Sequence[int]) -> int:
    size = 1
    for length in kernel:
        size *= length
    return size


def _mean(given: Given) -> Result:
    """Apply the rule of a mean or sum over ``axes``."""
    import numpy as np

    (x,) = given.inputs
    axes = sorted(axis % x.ndim for axis in given.node.arguments["axes"])
    others = [axis for axis in range(x.ndim) if axis not in axes]
    width = _size([x.shape[axis] for axis in axes])
    indices = _indices(x).transpose(*others, *axes).reshape(-1, width)
    taken, chosen = _Taken(given), np.flatnonzero(given.mask)
    signs, values = given.signs.reshape(-1), given.output.reshape(-1)
    for part in chunks(len(chosen), width):
        outputs = chosen[part]
        terms = x.reshape(-1)[indices[outputs]]
        kept = keep_terms(terms, None, values[outputs], signs[outputs], given.how.theta, None)
        taken.add(0, indices[outputs], outputs, kept.mask, kept.signs)
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
    taken.add(np.arange(len(columns)), np.stack(columns, axis=1), chosen, kept.mask, kept.signs)
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
