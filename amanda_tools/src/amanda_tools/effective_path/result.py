"""Result of effective paths: the sets of each sample and class, and their similarity."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path as FilePath
from typing import Any, Literal

from amanda_core.results import Table
from amanda_tools.effective_path.model import PathEnd
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.folders import create_folder, whole_file
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    render_html,
    render_json,
)

__all__ = ["EffectivePathResult", "LayerSum", "PathSets", "Thresholds"]

Part = Literal["points", "edges", "weights"]
By = Literal["op", "end"]


@dataclass
class PathSets:
    """A path of one sample, or the union of several paths.

    The sets are ascending arrays of indices into flattened arrays in their memory layout, without
    the axis of samples. The index of an edge is the index of its input times the number of outputs,
    plus the index of its output.

    Attributes:
        points: Name of a value (that of its producer) -> elements.
        edges: Name of an operator -> pairs of an input and an output.
        weights: Name of an operator -> elements of its weight.
        predicted: The predicted class; None for a union, or if there are no classes.
        samples: Number of samples in the union.
        run: Number of the run that the sample was in, counting from 0; None for a union.
    """

    points: dict[str, Any]
    edges: dict[str, Any] = field(default_factory=dict)
    weights: dict[str, Any] = field(default_factory=dict)
    predicted: int | None = None
    samples: int = 1
    run: int | None = None

    @classmethod
    def union(cls, paths: Iterable[PathSets]) -> PathSets:
        """Return the union of paths."""
        import numpy as np

        gathered: dict[str, dict[str, list[Any]]] = {"points": {}, "edges": {}, "weights": {}}
        samples = 0
        for path in paths:
            samples += path.samples
            for part, found in gathered.items():
                for name, indices in getattr(path, part).items():
                    found.setdefault(name, []).append(indices)
        sets: dict[str, Any] = {
            part: {name: np.unique(np.concatenate(parts)) for name, parts in found.items()}
            for part, found in gathered.items()
        }
        return cls(**sets, samples=samples)

    def similarities(self, other: PathSets, part: Part = "points") -> dict[str, float]:
        """Return the share of this path that is in the other, by value or operator, without empty
        ones.
        """
        return {
            name: _common(indices, getattr(other, part).get(name)) / len(indices)
            for name, indices in getattr(self, part).items()
            if len(indices)
        }

    def similarity(self, other: PathSets, part: Part = "points") -> float:
        """Return the share of this path that is in the other, in total; 1 for an empty path."""
        own = getattr(self, part)
        size = sum(map(len, own.values()))
        found = (_common(own[name], getattr(other, part).get(name)) for name in own)
        return sum(found) / size if size else 1.0


def _common(indices: Any, others: Any) -> int:
    import numpy as np

    return 0 if others is None else len(np.intersect1d(indices, others, assume_unique=True))


@dataclass
class LayerSum:
    """One operator or value, averaged over the samples.

    Attributes:
        name: Readable name.
        kind: Kind of its rule; ``input`` for a value that no operator produced, ``end`` for a value
            whose producer ends paths.
        elements: Number of elements of the value in one sample.
        points: Mean number of elements of the value in the path.
        density: Their share of the elements.
        edges: Mean number of edges of the operator in the path; None if it has none.
        edge_density: Their share of all its edges, including those of padding.
        weights: Mean number of elements of its weight in the path.
        weight_density: Their share of the whole weight.
        weight: The parameter, or the part of it, that is its weight; None if it has none, or one
            that is not a parameter.
    """

    name: str
    kind: str
    elements: int
    points: float
    density: float
    edges: float | None = None
    edge_density: float | None = None
    weights: float | None = None
    weight_density: float | None = None
    weight: str | None = None


@dataclass
class Thresholds:
    """Thresholds of one layer, for the variants that use them.

    Attributes:
        output: Threshold of the absolute values of its outputs.
        term: Threshold of the terms of its sums.
    """

    output: float
    term: float


@dataclass
class EffectivePathResult(Tabular):
    """Result of the extraction of effective paths.

    Attributes:
        variant: The variant; see `amanda_tools.effective_path.model.Extraction`.
        theta: Share of a sum that is kept.
        paths: One path for each sample, in the order of the samples.
        layers: Operators and values in the order of execution.
        thresholds: Name of an operator with a weight -> the thresholds that would select paths of
            this size, averaged over the samples.
        ends: Values before the network's input at which paths end, and why.
        empty: Number of runs without a path, because none of the possible starts can be followed.
        left_out: Number of samples beyond the limit, for which no path is kept.
        skipped: Number of runs that were left out to limit the cost; `PathSets.run` says which
            were not.
        first_seconds: Duration of the first run, in which operators are analysed.
        cost: How many times their own time the runs after the first took on average; None if this
            was not measured.
        tool_seconds: The part of `wall_seconds` spent in the tool.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        notes: What was not observed, and why.
    """

    records = "layers", LayerSum

    variant: str
    theta: float
    paths: list[PathSets] = field(default_factory=list)
    layers: list[LayerSum] = field(default_factory=list)
    thresholds: dict[str, Thresholds] = field(default_factory=dict)
    ends: list[PathEnd] = field(default_factory=list)
    empty: int = 0
    left_out: int = 0
    skipped: int = 0
    first_seconds: float = 0.0
    cost: float | None = None
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @property
    def density(self) -> float:
        """Return the mean share of all elements of all values that is in a path."""
        elements = sum(layer.elements for layer in self.layers)
        return sum(layer.points for layer in self.layers) / elements if elements else 0.0

    def class_paths(self, labels: Sequence[int] | None = None) -> dict[int, PathSets]:
        """Return the union of the paths of each class's samples.

        Args:
            labels: The correct class of each sample; only samples that were predicted correctly
                count. None treats all predictions as correct.

        Raises:
            ValueError: The number of labels differs from the number of samples.
        """
        if labels is not None and len(labels) != len(self.paths):
            why = f", because {format_count(self.skipped, 'run')} were left out" * bool(
                self.skipped
            )
            raise ValueError(
                f"there are {len(self.paths)} samples with a path and {len(labels)} labels{why}"
            )
        groups: dict[int, list[PathSets]] = {}
        for number, path in enumerate(self.paths):
            right = path.predicted if labels is None else int(labels[number])
            if right is not None and path.predicted == right:
                groups.setdefault(right, []).append(path)
        return {label: PathSets.union(groups[label]) for label in sorted(groups)}

    def similarities(
        self, class_paths: Mapping[int, PathSets], part: Part = "points"
    ) -> list[dict[str, float]]:
        """Return for each sample the share of its path that is in the path of its predicted class.

        Args:
            class_paths: Class -> path, as returned by `class_paths`.
            part: ``points``, ``edges`` or ``weights``.

        Returns:
            For each sample the shares by value or operator, and by ``""`` in total. All are 0 if
            its class has no path.
        """
        nothing = PathSets({})
        found = []
        for path in self.paths:
            whole = nothing if path.predicted is None else class_paths.get(path.predicted, nothing)
            similarities = path.similarities(whole, part)
            found.append({"": path.similarity(whole, part), **similarities})
        return found

    def table(self, by: By = "op") -> Table:
        """Return a table.

        Args:
            by: One row for each operator or value (``op``), or for each ``end`` of paths.

        Raises:
            ValueError: `by` has another value.
        """
        if by == "end":
            heads = ("op", "type", "runs", "why", "consequence")
            ends = [
                (end.name, end.type, end.runs, end.reason, end.consequence) for end in self.ends
            ]
            return Table(self._title(), heads, ends)
        if by != "op":
            raise ValueError(f"by must be op or end, but is {by!r}")
        columns = (
            *("op", "kind", "neurons", "of all neurons", "edges", "of all edges"),
            *("weights", "of all weights"),
        )
        rows = [
            (
                layer.name,
                layer.kind,
                layer.points,
                f"{layer.density:.2%}",
                *_cells(layer.edges, layer.edge_density),
                *_cells(layer.weights, layer.weight_density),
            )
            for layer in self.layers
        ]
        return Table(self._title(), columns, rows)

    def to_json(self) -> str:
        """Return the result as JSON, without the sets, which `write` writes."""
        return render_json(
            {
                "format": "amanda.effective_path/1",
                "merge": {"elements": "range", "samples": []},
                "variant": self.variant,
                "theta": self.theta,
                "density": self.density,
                "left_out": self.left_out,
                "skipped": self.skipped,
                "first_seconds": self.first_seconds,
                "cost": self.cost,
                "layers": self.layers,
                "thresholds": self.thresholds,
                "ends": [{**fields_of(end), "consequence": end.consequence} for end in self.ends],
                "empty": self.empty,
                "samples": [
                    {
                        "run": path.run,
                        "predicted": path.predicted,
                        "points": {name: len(found) for name, found in path.points.items()},
                        "edges": {name: len(found) for name, found in path.edges.items()},
                        "weights": {name: len(found) for name, found in path.weights.items()},
                    }
                    for path in self.paths
                ],
                "tool_seconds": self.tool_seconds,
                "wall_seconds": self.wall_seconds,
                "notes": self.notes,
                "charts": self._charts(),
            }
        )

    def write(self, folder: FilePath | str) -> list[FilePath]:
        """Write the sets of all samples to ``paths.npz`` in a folder, which is created if
        necessary.

        The arrays are called ``<sample>/<part>/<name>``. The file contains no pickles.
        """
        import numpy as np

        arrays = {
            f"{number}/{part}/{name}": indices
            for number, path in enumerate(self.paths)
            for part in ("points", "edges", "weights")
            for name, indices in getattr(path, part).items()
        }
        file = create_folder(folder) / "paths.npz"
        with whole_file(file) as new, new.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        return [file]

    def _repr_html_(self) -> str:
        return render_html([self.table(), *([self.table("end")] if self.ends else [])])

    def _charts(self) -> list[charts.Chart]:
        return [
            charts.figures(
                charts.figure("samples", len(self.paths)),
                charts.figure("of all neurons in a path", self.density, "%", "mean of the samples"),
                charts.figure("places where paths end", len(self.ends)),
            ),
            charts.points(
                "The path through the network",
                "layers",
                "density",
                value_label="of its neurons",
                color="kind",
                unit="%",
                x_label="layers, in order of execution",
            ),
            charts.bars(
                "Most of the path",
                [("layer", "layers", "")],
                charts.measure("neurons", "points"),
                charts.measure("edges", "edges"),
                charts.measure("weights", "weights"),
            ),
        ]

    def _title(self) -> str:
        parts = [
            f"{format_count(len(self.paths), 'path')} ({self.variant}, theta {self.theta:g}), "
            f"{self.density:.2%} of the neurons"
        ]
        if self.left_out:
            parts.append(f"{format_count(self.left_out, 'more sample')} left out")
        if self.skipped:
            parts.append(f"{format_count(self.skipped, 'run')} left out to limit the cost")
        lost = [f"{end.name} ({end.type}: {end.reason})" for end in self.ends if end.lost]
        if lost:
            parts.append(f"paths END at {format_count(len(lost), 'operator')}: {', '.join(lost)}")
        if self.empty:
            runs = format_count(self.empty, "run")
            parts.append(f"{runs} with NO path: what is at the end is not followed")
        parts += describe_overhead("the tool", self.tool_seconds, self.wall_seconds)
        if self.cost is not None:
            parts.append(
                f"the first run took {self.first_seconds:.3g} s, later ones {self.cost:.1f} times "
                "their own time"
            )
        return "; ".join([*parts, *self.notes])


def _cells(number: float | None, density: float | None) -> tuple[object, str]:
    return ("", "") if number is None or density is None else (number, f"{density:.2%}")
