"""A graph as one small picture, for the output of notebooks: the model's modules as boxes.

The same first view as that of the page: the outermost levels of modules, and what surrounds them as
one box each. Notebooks may drop scripts and style sheets, so there are none.
"""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from amanda_tools.graph.model import Graph, Op, Source
from amanda_tools.kit.operators.entries import with_parents
from amanda_tools.kit.output.rendering import format_count, format_quantity
from amanda_tools.kit.tensors.types import Position, TensorType

__all__ = ["Box", "boxes_of", "draw"]

#: How many boxes a picture has; a deeper level is shown if it fits.
_MOST = 24
_WIDTH, _HEIGHT, _GAP = 214, 38, 22


@dataclass
class Box:
    """A box of the picture.

    Attributes:
        name: Path of a module, a zone of the program such as ``(optimizer)``, or ``(program)``.
        ops: Its forward operators.
        parameters: Elements of the parameters that they are the first to read.
        before: Indices of the boxes whose values it takes, without those of later boxes.
        row: Row of the picture.
    """

    name: str
    ops: list[Op] = field(default_factory=list)
    parameters: int = 0
    before: set[int] = field(default_factory=set)
    row: int = 0


def boxes_of(graph: Graph) -> list[Box]:
    """Return the boxes, in the order of first execution.

    Modules are divided while there are few of them. Operators outside of modules are one box for
    each run of them.
    """
    most = max((len(with_parents(op.module)) - 1 for op in graph.ops), default=0)
    found = _divided(graph, 1)
    for depth in range(2, most + 1):
        deeper = _divided(graph, depth)
        if len(deeper) > _MOST:
            break
        found = deeper
    places = {op.index: place for place, box in enumerate(found) for op in box.ops}
    for source in graph.sources:
        edges = graph.edges_from(source)
        readers = [places[edge.consumer] for edge in edges if edge.consumer in places]
        if source.kind == "parameter" and readers:
            found[readers[0]].parameters += _elements(source)
    for edge in graph.edges:
        before, after = places.get(edge.producer), places.get(edge.consumer)
        if before is not None and after is not None and before < after:
            found[after].before.add(before)
    for box in found:
        box.row = max((found[place].row + 1 for place in box.before), default=0)
    return found


def draw(graph: Graph) -> str:
    """Return the picture as SVG; empty if there are no operators."""
    boxes = boxes_of(graph)
    left_out = boxes[_MOST:]
    boxes = boxes[:_MOST]
    if not boxes:
        return ""
    rows: dict[int, list[int]] = {}
    for place, box in enumerate(boxes):
        rows.setdefault(box.row, []).append(place)
    width = max(len(row) for row in rows.values()) * (_WIDTH + _GAP)
    corners: dict[int, tuple[float, float]] = {}
    for y, (_, row) in enumerate(sorted(rows.items())):
        left = (width - len(row) * (_WIDTH + _GAP)) / 2
        for at, place in enumerate(row):
            corners[place] = (left + at * (_WIDTH + _GAP), y * (_HEIGHT + _GAP))
    parts = [*_lines(boxes, corners), *(_drawn(box, *corners[n]) for n, box in enumerate(boxes))]
    height = len(rows) * (_HEIGHT + _GAP)
    if left_out:
        parts.append(f'<text x="0" y="{height + 4}">and {len(left_out)} more</text>')
    label = html.escape(f"{format_count(len(graph.ops), 'operator')} of {graph.namespace}")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'viewBox="-4 -4 {width + 8} {height + 16}" width="{min(960, width)}" '
        f'style="max-width: 100%" font-family="sans-serif" font-size="11" fill="currentColor">'
        f"{''.join(parts)}</svg>"
    )


def _divided(graph: Graph, depth: int) -> list[Box]:
    """Return boxes of modules at a depth, in the order of first execution."""
    named: dict[str, Box] = {}
    found: list[Box] = []
    around: Box | None = None
    for op in graph.ops:
        paths = with_parents(op.module)[1 : depth + 1]
        name = f"({op.zone})" if op.zone != "model" else paths[-1] if paths else ""
        if name:
            if name not in named:
                named[name] = Box(name)
                found.append(named[name])
            named[name].ops.append(op)
            if op.zone == "model":
                around = None
            continue
        if around is None:
            around = Box("(program)")
            found.append(around)
        around.ops.append(op)
    return found


def _elements(source: Source) -> int:
    shape = source.tensor.shape if source.tensor is not None else None
    return 0 if shape is None or None in shape else math.prod(size for size in shape if size)


def _lines(boxes: Sequence[Box], corners: dict[int, tuple[float, float]]) -> Iterator[str]:
    for place, box in enumerate(boxes):
        for before in box.before:
            (x1, y1), (x2, y2) = corners[before], corners[place]
            bend, left, right = (y1 + _HEIGHT + y2) / 2, x1 + _WIDTH / 2, x2 + _WIDTH / 2
            yield (
                f'<path d="M{left:.0f} {y1 + _HEIGHT:.0f}C{left:.0f} {bend:.0f} {right:.0f} '
                f'{bend:.0f} {right:.0f} {y2:.0f}" fill="none" stroke="#888" stroke-width="1.2"/>'
            )


def _drawn(box: Box, x: float, y: float) -> str:
    facts = [format_count(len(box.ops), "operator")]
    if box.parameters:
        facts.append(f"{format_quantity(box.parameters, '')} parameters".replace("  ", " "))
    else:
        facts.append(_shape(box.ops[-1].outputs))
    name = html.escape(_short(box.name))
    fact = html.escape(_short(", ".join(fact for fact in facts if fact)))
    model = not box.name.startswith("(")
    fill = "#0072b2" if model else "#888"
    return (
        f'<g transform="translate({x:.0f} {y:.0f})"><title>{html.escape(box.name)}</title>'
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" rx="6" fill="{fill}" fill-opacity="0.16" '
        f'stroke="{fill}"/><text x="{_WIDTH / 2:.0f}" y="16" text-anchor="middle" '
        f'font-weight="bold">{name}</text><text x="{_WIDTH / 2:.0f}" y="30" '
        f'text-anchor="middle" opacity="0.75">{fact}</text></g>'
    )


def _short(text: str) -> str:
    return text if len(text) <= 36 else f"…{text[-35:]}"


def _shape(outputs: Sequence[Position]) -> str:
    tensor = next((one for one in outputs if isinstance(one, TensorType)), None)
    if tensor is None or tensor.shape is None:
        return ""
    return f"{tensor.dtype}[{','.join('?' if n is None else str(n) for n in tensor.shape)}]"
