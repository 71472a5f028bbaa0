"""Result of the summary: the tree of modules with output shapes, parameters and costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from amanda_core.results import Table
from amanda_core.runtime.weak import Known
from amanda_tools.kit.operators.entries import with_parents
from amanda_tools.kit.output import charts
from amanda_tools.kit.output.rendering import (
    Tabular,
    describe_overhead,
    fields_of,
    format_count,
    format_quantity,
    render_json,
)
from amanda_tools.kit.weights.parameters import ModelParameters

__all__ = ["Model", "ModuleSummary", "SummaryResult"]

#: How many reasons for what is not counted a title lists.
_REASONS = 4


@dataclass
class ModuleSummary:
    """One module.

    Attributes:
        model: Name of the outermost module called that holds it; empty if the driver has no name.
        name: Its path; for the outermost module the name of the model.
        module: The same path; empty for the outermost module.
        type: Name of its class; empty if it is not known.
        depth: Number of modules around it.
        output: Shape of the result of the last operator in it, with None for an unknown dimension.
            None if no operator ran in it.
        dtype: Dtype of that result; empty if there is none.
        parameters: Number of elements of its parameters, including those of modules inside it. A
            parameter that several modules share counts at one of them.
        own_parameters: The same without those of modules inside it.
        macs: Multiply-accumulates of one forward pass, including those of modules inside it.
        own_macs: The same without those of modules inside it.
    """

    model: str
    name: str
    module: str
    type: str
    depth: int
    output: list[int | None] | None = None
    dtype: str = ""
    parameters: int = 0
    own_parameters: int = 0
    macs: int = 0
    own_macs: int = 0


class Model(ModelParameters):
    """One model: its modules, their parameters, and what they cost."""

    def __init__(self, root: str, nameless: Known[tuple[ModelParameters, str]]) -> None:
        super().__init__(root, nameless)
        #: Path -> shape and dtype of the latest result there.
        self.outputs: dict[str, tuple[tuple[int | None, ...] | None, str]] = {}
        self.macs: dict[str, int] = {}
        #: Why operators are not counted.
        self.not_counted: dict[str, None] = {}

    def show(self, path: str, shape: tuple[int | None, ...] | None, dtype: str) -> None:
        """Record the latest result in a module, which is the latest around it, too."""
        for around in with_parents(path):
            self.outputs[around] = shape, dtype

    def count(self, path: str, macs: int) -> None:
        """Add the cost of one execution in a module."""
        self.macs[path] = self.macs.get(path, 0) + macs

    def modules(self) -> list[ModuleSummary]:
        """Return the modules, each followed by those inside it."""
        own = self.by_module()
        found: dict[str, ModuleSummary] = {}
        for path in [*self.classes, *self.outputs, *own, *self.macs]:
            for depth, around in enumerate(with_parents(path)):
                if around not in found and self._is_shown(around):
                    found[around] = ModuleSummary(
                        self.root,
                        around or self.root or "(program)",
                        around,
                        self.classes.get(around, ""),
                        depth,
                        own_parameters=own.get(around, 0),
                        own_macs=self.macs.get(around, 0),
                    )
        for path, row in found.items():
            if (output := self.outputs.get(path)) is not None:
                row.output, row.dtype = None if output[0] is None else [*output[0]], output[1]
            for around in with_parents(path):
                found[around].parameters += row.own_parameters
                found[around].macs += row.own_macs
        rows = [*_in_tree_order(found)]
        if not self.root and len(rows) > 1:
            # There is no module around the outermost ones.
            first = rows[0]
            if not (first.own_macs or first.own_parameters):
                rows = rows[1:]
                for row in rows:
                    row.depth -= 1
            first.output, first.dtype = None, ""
        return rows

    def _is_shown(self, path: str) -> bool:
        """Return True unless nothing but the reading of a parameter happens at a path."""
        return not path or bool(self.classes.get(path)) or path in self.outputs


@dataclass
class SummaryResult(Tabular):
    """Result of the summary.

    Attributes:
        modules: The modules of each model, each followed by those inside it.
        parameters: Number of elements of all parameters.
        macs: Multiply-accumulates of one forward pass of each model.
        not_counted: Why operators with a cost are not counted.
        depth: Levels of modules that the table shows; 0 for all.
        tool_seconds: The part of `wall_seconds` spent in the tool.
        wall_seconds: Time from the first operator that the tool looked at to the last.
        notes: What was not observed, and why.
    """

    records = "modules", ModuleSummary

    modules: list[ModuleSummary] = field(default_factory=list)
    parameters: int = 0
    macs: int = 0
    not_counted: list[str] = field(default_factory=list)
    depth: int = 3
    tool_seconds: float = 0.0
    wall_seconds: float = 0.0
    notes: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, models: list[Model], depth: int, **more: Any) -> SummaryResult:
        """Return the result for models; one whose operators cost nothing is left out.

        Args:
            models: The models in the order of their first operator.
            depth: Levels of modules that the table shows; 0 for all.
            **more: Further attributes.
        """
        # What several models hold counts once.
        shapes = {owner: shape for model in models for owner, shape in model.shapes.items()}
        return cls(
            [row for m in models if m.root or m.macs or m.shapes for row in m.modules()],
            sum(map(math.prod, shapes.values())),
            sum(sum(model.macs.values()) for model in models),
            list(dict.fromkeys(reason for model in models for reason in model.not_counted)),
            depth,
            **more,
        )

    def figures(self) -> dict[str, float | None]:
        """Return the totals."""
        return {"parameters": self.parameters, "macs": self.macs}

    def table(self, depth: int | None = None) -> Table:
        """Return the tree of modules as a table.

        Args:
            depth: How many levels of modules to show; 0 for all. None for the tool's option.
        """
        limit = self.depth if depth is None else depth
        rows = [
            (
                "  " * row.depth + _last(row),
                row.type,
                _shape(row),
                row.parameters,
                row.macs,
            )
            for row in self.modules
            if not limit or row.depth <= limit
        ]
        return Table(self._title(), ("module", "class", "last result", "parameters", "MACs"), rows)

    def to_json(self) -> str:
        """Return the whole result as JSON."""
        macs = charts.measure("MACs", "own_macs", unit="MACs")
        parameters = charts.measure("parameters", "own_parameters")
        drawn = [
            charts.figures(
                charts.figure("parameters", self.parameters),
                charts.figure("forward pass", self.macs, "MACs"),
                charts.figure("modules", len(self.modules)),
            ),
            charts.icicle("Modules", "modules", parameters, *([macs] if self.macs else [])),
        ]
        units = dict.fromkeys(("macs", "own_macs"), "MACs")
        return render_json(
            {
                "format": "amanda.summary/1",
                "units": units,
                "merge": {
                    "depth": "max",
                    **dict.fromkeys(("modules", "parameters", "own_parameters"), "shared"),
                },
                **fields_of(self),
                "charts": drawn,
            }
        )

    def _title(self) -> str:
        parts = [
            format_count(self.parameters, "parameter"),
            f"{format_quantity(self.macs, 'MACs')} in one forward pass",
        ]
        if self.not_counted:
            more = ", ..." if len(self.not_counted) > _REASONS else ""
            parts.append(f"NOT counted: {', '.join(self.not_counted[:_REASONS])}{more}")
        parts += describe_overhead("this", self.tool_seconds, self.wall_seconds)
        return "; ".join([*parts, *self.notes])


def _in_tree_order(rows: dict[str, ModuleSummary]) -> Iterator[ModuleSummary]:
    inside: dict[str, list[str]] = {}
    for path in rows:
        if path:
            inside.setdefault(with_parents(path)[-2], []).append(path)
    waiting = [""] if "" in rows else []
    while waiting:
        path = waiting.pop()
        yield rows[path]
        waiting += reversed(inside.get(path, []))


def _last(row: ModuleSummary) -> str:
    """Return the last part of a path; the whole program has none."""
    return row.module[len(with_parents(row.module)[-2]) :].lstrip("./") if row.module else row.name


def _shape(row: ModuleSummary) -> str:
    if row.output is None:
        return "?" if row.dtype else "--"
    return f"[{', '.join('?' if n is None else str(n) for n in row.output)}]"
