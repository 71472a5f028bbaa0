"""Effective paths as published, one number at a time: the oracle for the tool.

Networks are lists of layers, run with PyTorch's functions, and paths are found in plain loops.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

__all__ = ["Network", "Selection", "networks", "path_of"]

Index = tuple[int, ...]
Terms = dict[Index, float]


@dataclass
class Network:
    """Layers, each with its kind, the numbers of its inputs, and its arguments.

    Value 0 is the input; layer i computes value i + 1.
    """

    layers: list[tuple[str, tuple[int, ...], dict[str, Any]]] = field(default_factory=list)

    def add(self, kind: str, *inputs: int, **arguments: Any) -> int:
        self.layers.append((kind, inputs, arguments))
        return len(self.layers)

    def run(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return all values."""
        values = [x]
        for kind, inputs, arguments in self.layers:
            values.append(FORWARD[kind](*(values[number] for number in inputs), **arguments))
        return values


FORWARD: dict[str, Callable[..., torch.Tensor]] = {
    "conv": F.conv2d,
    "linear": F.linear,
    "max_pool": F.max_pool2d,
    "avg_pool": lambda x, **given: F.avg_pool2d(x, **given, count_include_pad=False),
    "mean": lambda x: x.mean((2, 3)),
    "batch_norm": lambda x, **given: F.batch_norm(x, **given, training=False),
    "relu": torch.relu,
    "add": torch.add,
    "concat": lambda *values: torch.cat(values, 1),
    "pad": lambda x, width: F.pad(x, [width] * 4),
    "flatten": lambda x: x.flatten(1),
    "transpose": lambda x: x.permute(0, 1, 3, 2),
    "slice": lambda x, start, step: x[:, start::step],
}


@dataclass
class Selection:
    """Options of a path, named as in the paper."""

    theta: float
    variant: str = "cumulative"
    output_threshold: float = 0.0
    term_threshold: float = 0.0


@dataclass
class Found:
    """A path: elements of each value, edges of each layer, and its weights."""

    points: dict[int, set[Index]] = field(default_factory=dict)
    edges: dict[int, set[tuple[int, Index, Index]]] = field(default_factory=dict)
    weights: dict[int, set[Index]] = field(default_factory=dict)


def kept(terms: Terms, theta: float) -> list[Index]:
    """Return the shortest prefix in descending order that makes up the share."""
    ordered = sorted(terms, key=lambda index: -terms[index])
    total = math.fsum(terms.values())
    if 1 / len(terms) >= theta or total <= 0:
        return ordered[:1]
    sum_, found = 0.0, []
    for index in ordered:
        found.append(index)
        sum_ += terms[index]
        if sum_ >= theta * total:
            break
    return found


def path_of(network: Network, values: Sequence[Any], how: Selection) -> Found:
    """Return the path of one sample, given its values without the axis of samples."""
    found = Found()
    last = len(values) - 1
    logits = values[last]
    signs: dict[int, dict[Index, int]] = {}
    if how.variant == "FwAB":
        for number, (kind, inputs, arguments) in enumerate(network.layers):
            if kind in ("conv", "linear"):
                seeds = above(values[number + 1], how.output_threshold)
                found.points[number + 1] = seeds
                walk(number, kind, inputs, arguments, values, dict.fromkeys(seeds, 1), how, found)
        return found
    seeds = (
        {largest(logits)} if how.variant == "cumulative" else above(logits, how.output_threshold)
    )
    signs[last] = dict.fromkeys(seeds, 1)
    for number in reversed(range(len(network.layers))):
        if number + 1 not in signs:
            continue
        kind, inputs, arguments = network.layers[number]
        taken = walk(number, kind, inputs, arguments, values, signs[number + 1], how, found)
        for value, marks in taken:
            into = signs.setdefault(value, {})
            for index, sign in marks.items():
                into[index] = sign if into.get(index, sign) == sign else 1
    found.points.update({value: set(marks) for value, marks in signs.items()})
    return found


def above(output: Any, threshold: float) -> set[Index]:
    chosen = {index for index in np.ndindex(output.shape) if abs(output[index]) > threshold}
    return chosen or {largest(output)}


def largest(output: Any) -> Index:
    return max(np.ndindex(output.shape), key=lambda index: output[index])


def walk(
    number: int,
    kind: str,
    inputs: tuple[int, ...],
    arguments: dict[str, Any],
    values: Sequence[Any],
    outputs: dict[Index, int],
    how: Selection,
    found: Found,
) -> list[tuple[int, dict[Index, int]]]:
    """Add what one layer takes of its inputs, with signs."""
    y = values[number + 1]
    given = [values[value] for value in inputs]
    marks: list[dict[Index, int]] = [{} for _ in inputs]
    for output in sorted(outputs):
        sign = outputs[output]
        if kind in PASSING:
            for place, index in PASSING[kind](output, [x.shape for x in given], arguments):
                marks[place][index] = sign
            continue
        if kind == "batch_norm":
            product = given[0][output] * y[output]
            marks[0][output] = -1 if product < 0 else 1
            continue
        found.edges.setdefault(number, set())
        terms, weights = terms_of(kind, output, given, arguments)
        if not terms:
            continue  # Nothing but padding.
        if kind == "max_pool":
            largest = max(terms.values())
            chosen = [index for index in terms if terms[index] == largest and largest > 0]
            handed = sign
        else:
            if y[output] * sign < 0:
                terms = {index: -term for index, term in terms.items()}
            absolute = how.variant in ("BwAB", "FwAB") and kind in ("conv", "linear")
            chosen = (
                [index for index in terms if terms[index] >= how.term_threshold]
                if absolute
                else kept(terms, how.theta)
            )
            handed = -1 if sign == -1 and max(terms.values()) < 0 else 1
        for term in chosen:
            place, index = term[0], term[1:]
            marks[place].setdefault(index, handed)
            found.edges[number].add((place, index, output))
            if weights:
                found.weights.setdefault(number, set()).add(weights[term])
    return list(zip(inputs, marks, strict=True))


def terms_of(
    kind: str, output: Index, given: Sequence[Any], arguments: dict[str, Any]
) -> tuple[Terms, dict[Index, Index]]:
    """Return the terms of an output by number and place of the input, and the weights' places."""
    terms: Terms = {}
    weights: dict[Index, Index] = {}
    x = given[0]
    if kind == "add":
        return {(place, *output): float(v[output]) for place, v in enumerate(given)}, {}
    if kind == "mean":
        rows, columns = x.shape[1:]
        for inside in itertools.product(range(rows), range(columns)):
            terms[(0, output[0], *inside)] = float(x[(output[0], *inside)])
        return terms, {}
    if kind == "linear":
        for i in range(len(x)):
            weight = (output[0], i)
            terms[(0, i)] = float(arguments["weight"][weight]) * float(x[i])
            weights[(0, i)] = weight
        return terms, weights
    channel, row, column = output
    stride = arguments.get("stride", 1)
    padding, dilation = arguments.get("padding", 0), arguments.get("dilation", 1)
    if kind == "conv":
        weight = arguments["weight"]
        depth, *kernel = weight.shape[1:]
        first = channel // (len(weight) // arguments.get("groups", 1)) * depth
    else:
        kernel, depth, first = [arguments["kernel_size"]] * 2, 1, channel
    for c, i, j in itertools.product(range(depth), range(kernel[0]), range(kernel[1])):
        place = (
            first + c,
            row * stride - padding + i * dilation,
            column * stride - padding + j * dilation,
        )
        if not (0 <= place[1] < x.shape[1] and 0 <= place[2] < x.shape[2]):
            continue
        factor = float(arguments["weight"][channel, c, i, j]) if kind == "conv" else 1.0
        terms[(0, *place)] = factor * float(x[place])
        if kind == "conv":
            weights[(0, *place)] = (channel, c, i, j)
    return terms, weights


Places = Iterator[tuple[int, Index]]


def same(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    yield 0, output


def flattened(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    yield 0, tuple(int(i) for i in np.unravel_index(output[0], shapes[0]))


def swapped(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    yield 0, (output[0], output[2], output[1])


def unpadded(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    width = arguments["width"]
    index = (output[0], output[1] - width, output[2] - width)
    if all(0 <= i < size for i, size in zip(index, shapes[0], strict=True)):
        yield 0, index


def spread(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    start = arguments["start"] % shapes[0][0]  # From the end, if it is negative.
    yield 0, (start + output[0] * arguments["step"], *output[1:])


def split(output: Index, shapes: Sequence[Index], arguments: dict[str, Any]) -> Places:
    start = 0
    for place, shape in enumerate(shapes):
        if start <= output[0] < start + shape[0]:
            yield place, (output[0] - start, *output[1:])
        start += shape[0]


PASSING: dict[str, Callable[[Index, Sequence[Index], dict[str, Any]], Places]] = {
    "relu": same,
    "flatten": flattened,
    "transpose": swapped,
    "pad": unpadded,
    "concat": split,
    "slice": spread,
}


def networks(count: int, seed: int = 0) -> Iterator[tuple[Network, torch.Tensor]]:
    """Yield random networks with an input of 2 samples, in double precision."""
    generator = np.random.default_rng(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.from_numpy(generator.normal(size=shape))

    def one_of(*choices: Any) -> Any:
        return choices[int(generator.integers(len(choices)))]

    for _ in range(count):
        network = Network()
        channels, side = one_of(2, 4), one_of(6, 7, 8)
        x = draw(2, channels, side, side)
        width = 4
        value = 0
        if one_of(True, False):
            value = network.add("pad", value, width=1)
        kernel, groups = one_of(1, 2, 3), one_of(1, 2)
        value = network.add(
            "conv",
            value,
            weight=draw(width, channels // groups, kernel, kernel),
            bias=draw(width),
            stride=one_of(1, 2),
            padding=one_of(0, 1),
            dilation=one_of(1, 2) if kernel == 2 else 1,
            groups=groups,
        )
        if one_of(True, False):
            value = network.add("batch_norm", value, **norm(draw, width))
        before = value = network.add("relu", value)
        value = network.add(
            "conv", value, weight=draw(width, width, 3, 3), bias=draw(width), padding=1
        )
        if one_of(True, False):
            value = network.add("batch_norm", value, **norm(draw, width))
        if one_of(True, False):
            value = network.add("transpose", value)
            value = network.add("transpose", value)
        value = network.add(one_of("add", "concat"), value, before)
        if one_of(True, False):
            value = network.add("relu", value)
        if one_of(True, False):
            value = network.add(one_of("max_pool", "avg_pool"), value, kernel_size=2, stride=2)
        if one_of(True, False):
            value = network.add("slice", value, start=one_of(0, 1, -3), step=one_of(1, 2))
        value = network.add(one_of("mean", "flatten"), value)
        features = network.run(x)[value].shape[1]
        value = network.add("linear", value, weight=draw(6, features), bias=draw(6))
        value = network.add("relu", value)
        network.add("linear", value, weight=draw(3, 6), bias=draw(3))
        yield network, x


def norm(draw: Callable[..., torch.Tensor], width: int) -> dict[str, torch.Tensor]:
    return {
        "running_mean": draw(width),
        "running_var": draw(width).abs() + 0.1,
        "weight": draw(width),
        "bias": draw(width),
    }
