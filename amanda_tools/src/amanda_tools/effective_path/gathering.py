"""Paths of all runs so far, and the statistics of the operators in them.

Converts the masks of a run to sets of indices for each sample. NumPy is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_tools.effective_path.budget import Budget
from amanda_tools.effective_path.model import Extraction, Layer, PathEnd
from amanda_tools.effective_path.paths import Path
from amanda_tools.effective_path.result import EffectivePathResult, LayerSum, PathSets, Thresholds
from amanda_tools.effective_path.runs import Network, elements
from amanda_tools.operators.clock import Clock

__all__ = ["Gathered"]


class Gathered:
    """Paths of all runs so far."""

    def __init__(self) -> None:
        self.paths: list[PathSets] = []
        self.left_out = 0
        #: Name and reason -> the value at which paths end.
        self.ends: dict[tuple[str, str], PathEnd] = {}
        self.empty = 0
        #: Name -> kind, number of elements, of possible edges, and of elements of the weight.
        self.sizes: dict[str, tuple[str, int, int, int]] = {}
        #: Name -> the parameter that is its weight.
        self.weights: dict[str, str | None] = {}
        #: Name -> thresholds of the samples.
        self.thresholds: dict[str, list[tuple[float, float]]] = {}

    def add(self, network: Network, path: Path, edges: bool, limit: int, run: int) -> None:
        """Add the paths of the run of this number, up to `limit` in total."""
        import numpy as np

        assert network.logits is not None
        values = network.values
        logits = values[network.logits]
        reached: dict[tuple[str, str], PathEnd] = {}
        for number, mask in path.points.items():
            if number in network.ended and mask.any():
                found = network.ended[number]
                reached[found.name, found.reason] = found
        for key, found in reached.items():
            self.ends.setdefault(key, found).runs += 1
        made = {node.output: node for node in network.nodes}
        for number in sorted(path.points):
            name, node = network.names[number], made.get(number)
            layer = None if node is None else path.layers.get(node.name)
            weight = 0 if node is None else int(np.size(node.arguments.get("weight", ())))
            self.weights[name] = None if node is None else node.arguments.get("weight_key")
            self.sizes.setdefault(
                name,
                (
                    network.kind_of(number) if node is None else node.kind,
                    elements(values, number),
                    0 if layer is None else layer.possible,
                    weight,
                ),
            )
        for name, layer in path.layers.items():
            if layer.output_threshold is not None:
                pairs = np.stack([layer.output_threshold, layer.term_threshold], axis=1)
                self.thresholds.setdefault(name, []).extend(map(tuple, pairs.tolist()))
        room = max(0, limit - len(self.paths))
        self.left_out += max(0, len(logits) - room)
        kept = min(room, len(logits))
        nodes = {node.name: node for node in network.nodes}
        found_edges: dict[str, list[Any]] = {}
        found_weights: dict[str, list[Any]] = {}
        for name, layer in path.layers.items() if edges else ():
            node = nodes[name]
            inputs = [values[number] for number in node.inputs]
            found_edges[name] = _edges_of(layer, inputs, values[node.output])
            if layer.weights is not None:
                found_weights[name] = _split(layer.weights[:, 0], layer.weights[:, 1], len(logits))
        for sample in range(kept):
            sets = PathSets(
                {
                    network.names[number]: np.flatnonzero(mask[sample])
                    for number, mask in path.points.items()
                },
                predicted=int(logits[sample].argmax())
                if logits.ndim == 2 and logits.size
                else None,
                run=run,
            )
            sets.edges.update({name: parts[sample] for name, parts in found_edges.items()})
            sets.weights.update({name: parts[sample] for name, parts in found_weights.items()})
            self.paths.append(sets)

    def result(
        self, how: Extraction, clock: Clock, budget: Budget, notes: list[str]
    ) -> EffectivePathResult:
        """Return the result so far."""
        import numpy as np

        return EffectivePathResult(
            how.variant,
            how.theta,
            list(self.paths),
            [self._sum(name) for name in self.sizes],
            {
                name: Thresholds(*map(float, np.nanmean(np.array(pairs), axis=0)))
                for name, pairs in self.thresholds.items()
                if not np.isnan(np.array(pairs)).all(axis=0).any()
            },
            list(self.ends.values()),
            self.empty,
            self.left_out,
            budget.skipped,
            budget.first / 1e9,
            budget.ratio,
            tool_seconds=clock.spent / 1e9,
            wall_seconds=clock.wall / 1e9,
            notes=notes,
        )

    def _sum(self, name: str) -> LayerSum:
        kind, count, possible, weight = self.sizes[name]

        def mean(part: str) -> float | None:
            found = [len(sets[name]) for p in self.paths if name in (sets := getattr(p, part))]
            return sum(found) / len(found) if found else None

        points, edges, weights = mean("points") or 0.0, mean("edges"), mean("weights")
        return LayerSum(
            name,
            kind,
            count,
            points,
            points / count if count else 0.0,
            edges,
            None if edges is None or not possible else edges / possible,
            weights,
            None if weights is None or not weight else weights / weight,
            self.weights[name],
        )


def _edges_of(layer: Layer, inputs: Sequence[Any], output: Any) -> list[Any]:
    """Return the edges of each sample, each edge as one number."""
    import numpy as np

    size = output[0].size
    sizes = np.array([value[0].size for value in inputs])
    starts = np.cumsum(sizes) - sizes
    number, taken, made = layer.edges
    samples = made // size
    if len(inputs) == 1:
        place = taken - samples * sizes[0]
    else:
        place = starts[number] + taken % sizes[number]
    return [
        np.sort(part) for part in _split(samples, place * size + made - samples * size, len(output))
    ]


def _split(samples: Any, numbers: Any, count: int) -> list[Any]:
    """Return the numbers of each sample, in order."""
    import numpy as np

    if (samples[1:] < samples[:-1]).any():
        order = np.argsort(samples, kind="stable")
        samples, numbers = samples[order], numbers[order]
    ends = np.searchsorted(samples, np.arange(1, count))
    return [part.copy() for part in np.split(numbers, ends)]
