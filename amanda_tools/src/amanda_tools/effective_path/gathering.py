"""Paths of all runs so far, and the statistics of the operators in them.

Converts the masks of a run to sets of indices for each sample. NumPy is imported only when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from amanda_tools.effective_path.budget import Budget
from amanda_tools.effective_path.model import Extraction, Layer, PathEnd
from amanda_tools.effective_path.network import Network, elements
from amanda_tools.effective_path.paths import Path
from amanda_tools.effective_path.result import EffectivePathResult, LayerSum, PathSets, Thresholds
from amanda_tools.kit.operators.clock import Clock

__all__ = ["Gathered"]


class Gathered:
    """Paths of all runs so far."""

    def __init__(self) -> None:
        self.paths: list[PathSets] = []
        self.left_out = 0
        #: Name and reason -> the value at which paths end.
        self.ends: dict[tuple[str, str], PathEnd] = {}
        self.empty = 0
        #: Why runs have no path.
        self.reasons: dict[str, None] = {}
        #: Name -> kind, number of elements, of possible edges, and of elements of the weight.
        self.sizes: dict[str, tuple[str, int, int, int]] = {}
        #: Name -> the parameter that is its weight.
        self.weights: dict[str, str | None] = {}
        #: Name -> thresholds of the samples.
        self.thresholds: dict[str, list[tuple[float, float]]] = {}

    def add(
        self, network: Network, path: Path, edges: bool, limit: int, run: int, start: int
    ) -> None:
        """Add the paths of the run of this number, up to `limit` in total.

        Args:
            network: The network of the run.
            path: Its paths.
            edges: Whether edges are kept.
            limit: How many paths are kept in total.
            run: Number of the run.
            start: Position of the token at which the paths start.
        """
        assert network.logits is not None
        logits = network.values[network.logits]
        self._add_ends(network, path)
        self._add_sizes(network, path)
        self._add_thresholds(path)
        kept = min(max(0, limit - len(self.paths)), len(logits))
        self.left_out += len(logits) - kept
        found = _Edges(network, path, len(logits)) if edges else None
        self.paths += [_sets(network, path, found, sample, run, start) for sample in range(kept)]

    def _add_ends(self, network: Network, path: Path) -> None:
        """Count the values at which the paths of a run end."""
        reached: dict[tuple[str, str], PathEnd] = {}
        for number, mask in path.points.items():
            if number in network.ended and mask.any():
                found = network.ended[number]
                reached[found.name, found.reason] = found
        for key, found in reached.items():
            self.ends.setdefault(key, found).runs += 1

    def _add_sizes(self, network: Network, path: Path) -> None:
        """Note the sizes of the operators, and of the inputs, in the paths of a run."""
        import numpy as np

        made = {node.output: node for node in network.nodes}
        for number in sorted(path.points):
            name, node = network.names[number], made.get(number)
            kind, possible, weight, key = network.kind_of(number), 0, 0, None
            if node is not None:
                kind, key = node.kind, node.arguments.get("weight_key")
                weight = int(np.size(node.arguments.get("weight", ())))
                layer = path.layers.get(node.name)
                possible = 0 if layer is None else layer.possible
            self.weights[name] = key
            self.sizes.setdefault(name, (kind, elements(network.values, number), possible, weight))

    def _add_thresholds(self, path: Path) -> None:
        import numpy as np

        for name, layer in path.layers.items():
            if layer.output_threshold is not None:
                pairs = np.stack([layer.output_threshold, layer.term_threshold], axis=1)
                self.thresholds.setdefault(name, []).extend(map(tuple, pairs.tolist()))

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
            notes=[*notes, *(f"NO path: {why}" for why in self.reasons)],
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


class _Edges:
    """The edges and the weights in the paths of a run: name of an operator -> those of each
    sample.
    """

    def __init__(self, network: Network, path: Path, samples: int) -> None:
        nodes, values = {node.name: node for node in network.nodes}, network.values
        self.edges: dict[str, list[Any]] = {}
        self.weights: dict[str, list[Any]] = {}
        for name, layer in path.layers.items():
            inputs = [values[number] for number in nodes[name].inputs]
            self.edges[name] = _edges_of(layer, inputs, values[nodes[name].output])
            if layer.weights is not None:
                self.weights[name] = _split(layer.weights[:, 0], layer.weights[:, 1], samples)


def _sets(
    network: Network, path: Path, found: _Edges | None, sample: int, run: int, start: int
) -> PathSets:
    """Return the path of one sample of a run."""
    import numpy as np

    assert network.logits is not None
    logits, names = network.values[network.logits], network.names
    if logits.ndim == 3:
        logits = logits[:, start]
    is_score = logits.ndim == 2 and logits.size
    sets = PathSets(
        {names[number]: np.flatnonzero(mask[sample]) for number, mask in path.points.items()},
        predicted=int(logits[sample].argmax()) if is_score else None,
        run=run,
    )
    if found is not None:
        sets.edges.update({name: parts[sample] for name, parts in found.edges.items()})
        sets.weights.update({name: parts[sample] for name, parts in found.weights.items()})
    return sets


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
