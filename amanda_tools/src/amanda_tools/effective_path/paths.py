"""Extraction of effective paths: the neurons, synapses and weights that determine a prediction.

Walks from the prediction back to the input (Qiu et al., 2019), or follows a variant (Gan et al.,
2020). The module `rules` decides what an operator takes of its inputs. Works on NumPy arrays, for
all samples of a batch at once. NumPy is imported only when needed.
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
    """Paths of the samples of a batch.

    Attributes:
        points: Value -> booleans for the elements that are in the path.
        layers: Name of a node -> the part of it in the path.
    """

    points: dict[int, Any]
    layers: dict[str, Layer]


def seeds_of(logits: Any, threshold: float | None, start: int | None = None) -> Any:
    """Return where paths start: the largest output of each sample, or all above a threshold.

    Args:
        logits: Outputs, with the samples along the first axis.
        threshold: Threshold of absolute values; None for the largest output only. If no output is
            above it, the largest is used.
        start: Position of the token whose outputs count, if there are three axes; None for all.
    """
    import numpy as np

    if logits.ndim == 3 and start is not None:
        found = np.zeros(logits.shape, bool)
        found[:, start] = seeds_of(logits[:, start], threshold)
        return found
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
        logits: Number of the value at which the paths start.
        how: Options of the extraction.
    """
    import numpy as np

    if not values[logits].size:
        return Path({}, {})
    # What has no elements adds nothing to a path.
    nodes = [n for n in nodes if all(values[v].size for v in (*n.inputs, n.output))]
    if how.variant == "FwAB":
        return _forward(_leading_to(logits, nodes), values, how)
    last = next((node.name for node in nodes if node.output == logits), "")
    threshold = None if how.variant == "cumulative" else how.output_threshold(last)
    chosen = {logits: seeds_of(values[logits], threshold, how.start)}
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
    """Return the nodes that the logits depend on, in order, without others such as those of
    gradients.
    """
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
    """Merge the signs that two operators give a value; use 1 where they disagree."""
    import numpy as np

    both = np.where(signs == more_signs, signs, 1)
    return np.where(mask & more, both, np.where(mask, signs, more_signs)).astype(np.int8)
