"""Extraction of effective paths: the neurons, synapses and weights that bring a prediction about.

Owns the walk from the prediction back to the input (Qiu et al., 2019) and the variants (Gan et al.,
2020). What an operator takes of its inputs is `rules`'. Works on NumPy arrays alone, for all
samples of a batch at once; NumPy is imported when it is used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from amanda_tools.effective_path.model import WEIGHTED, Extraction, Layer, Node
from amanda_tools.effective_path.rules import apply

__all__ = ["Path", "extract", "seeds_of"]


@dataclass
class Path:
    """The paths of the samples of a batch.

    Attributes:
        points: Value -> truth values, which of its elements are in the path.
        layers: Name of a node -> what the path takes of it.
    """

    points: dict[int, Any]
    layers: dict[str, Layer]


def seeds_of(logits: Any, threshold: float | None) -> Any:
    """Where a path begins: the largest output of each sample, or those above a threshold.

    Args:
        logits: Of the samples, along the first axis.
        threshold: For absolute values; None for the largest alone. Where none is above it, the
            largest is taken.
    """
    import numpy as np

    flat = logits.reshape(len(logits), -1)
    largest = np.arange(flat.shape[1]) == flat.argmax(axis=1)[:, None]
    if threshold is None:
        return largest.reshape(logits.shape)
    above = np.abs(flat) > threshold
    return np.where(above.any(axis=1, keepdims=True), above, largest).reshape(logits.shape)


def extract(nodes: Sequence[Node], values: Mapping[int, Any], logits: int, how: Extraction) -> Path:
    """Extract the paths of a batch.

    Args:
        nodes: The operators in the order in which they ran.
        values: Number -> value, with the samples along the first axis.
        logits: Number of the value where the paths begin.
        how: How they are extracted.
    """
    import numpy as np

    if not len(values[logits]):
        return Path({}, {})
    if how.variant == "FwAB":
        return _forward(_leading_to(logits, nodes), values, how)
    last = next((node.name for node in nodes if node.output == logits), "")
    threshold = None if how.variant == "cumulative" else how.output_threshold(last)
    chosen = {logits: seeds_of(values[logits], threshold)}
    signs = {logits: np.ones(values[logits].shape, np.int8)}
    layers: dict[str, Layer] = {}
    for node in reversed(nodes):
        if node.output not in chosen:
            continue
        phi = how.term_threshold(node.name) if how.variant == "BwAB" else None
        result = apply(node, values, chosen[node.output], signs[node.output], how, phi)
        if result.layer is not None:
            layers[node.name] = result.layer
        for number, mask, flips in zip(node.inputs, result.masks, result.signs, strict=True):
            if mask is None:
                continue
            if number in chosen:
                flips = _merged(chosen[number], signs[number], mask, flips)
                mask = chosen[number] | mask
            chosen[number], signs[number] = mask, flips
    return Path(chosen, {node.name: layers[node.name] for node in nodes if node.name in layers})


def _leading_to(logits: int, nodes: Sequence[Node]) -> list[Node]:
    """The nodes that the logits depend on, in order: no others, such as those of gradients."""
    needed, found = {logits}, []
    for node in reversed(nodes):
        if node.output in needed:
            needed.update(node.inputs)
            found.append(node)
    return found[::-1]


def _forward(nodes: Sequence[Node], values: Mapping[int, Any], how: Extraction) -> Path:
    import numpy as np

    points: dict[int, Any] = {}
    layers: dict[str, Layer] = {}
    for node in nodes:
        if node.kind not in WEIGHTED:
            continue
        output = values[node.output]
        mask = seeds_of(output, how.output_threshold(node.name))
        points[node.output] = mask
        ones = np.ones(output.shape, np.int8)
        phi = how.term_threshold(node.name)
        found = apply(node, values, mask, ones, how, phi).layer
        assert found is not None
        layers[node.name] = found
    return Path(points, layers)


def _merged(mask: Any, signs: Any, more: Any, more_signs: Any) -> Any:
    """Signs of what two operators take of a value; 1 where they disagree."""
    import numpy as np

    both = np.where(signs == more_signs, signs, 1)
    return np.where(mask & more, both, np.where(mask, signs, more_signs)).astype(np.int8)
