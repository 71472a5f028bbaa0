"""Which op a node is: its key, name, module path and source line, and the weights that it reads.

Owns what is read from the metadata of exporters. PyTorch's exporter writes for each node the
modules around it and the lines that called it. Older ones have the modules in the names of nodes.
"""

from __future__ import annotations

import ast
import re
import weakref
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import onnxruntime

from amanda_core.driver_kit import Found, OpContext, OpRecord, Place, Reads, Weight
from amanda_core.interface import Site
from amanda_driver_onnxruntime.graphs import Graph, Model, Node

__all__ = ["NAMESPACE", "Finder", "Names"]

NAMESPACE = f"onnxruntime/{onnxruntime.__version__}/graph"
_TORCH = "pkg.torch.onnx."
_LINE = re.compile(r'File "([^"]+)", line (\d+)')


def scopes_of(node: Node) -> list[str]:
    """Return the paths of the modules around a node, outermost first; that one's path is empty."""
    return _listed(node.metadata.get(f"{_TORCH}name_scopes", ""))[:-1]


def module_path_of(node: Node) -> str:
    """Return the path of the module that a node belongs to, or an empty string."""
    scopes = scopes_of(node)
    if scopes:
        return scopes[-1]
    path: list[str] = []
    # Such as /layer1/layer1.0/conv1/Conv: children of containers repeat the name of these.
    for part in node.proto.name.strip("/").split("/")[:-1]:
        last = path[-1] if path else ""
        path.append(part.removeprefix(f"{last}.") if last else part)
    return ".".join(path)


def source_of(node: Node) -> str | None:
    """Return ``file:line`` of the call in the user's program; None if it is not known."""
    lines = _LINE.findall(node.metadata.get(f"{_TORCH}stack_trace", ""))
    lines = [(file.replace("\\", "/"), line) for file, line in lines]
    own = [(file, line) for file, line in lines if "/torch/" not in file]
    if not own:
        return None
    file, line = own[-1]
    return f"{file.rpartition('/')[2]}:{line}"


def _listed(text: str) -> list[str]:
    try:
        found = ast.literal_eval(text) if text else []
    except (SyntaxError, ValueError):  # It is not as PyTorch writes it.
        return []
    return [str(one) for one in found] if isinstance(found, list) else []


class Names:
    """The names of models and of their operators, the same in all threads and processes."""

    def __init__(self) -> None:
        #: Key of a model -> a number for each set of weights, in the order of their first runs.
        self._known: dict[str, list[int]] = {}
        #: Name -> the models that would have it.
        self._roots: dict[str, list[tuple[str, int]]] = {}

    def add(self, model: Model) -> tuple[str, dict[Node, OpRecord]]:
        """Return the name of a model, and a record for each operator, also for those inside others.

        Models with the same nodes and other weights have other operators.
        """
        known = self._known.setdefault(model.key, [])
        if model.weights_key not in known:
            known.append(model.weights_key)
        key = model.key, known.index(model.weights_key)
        name = _class_of(model) or model.title or "model"
        roots = self._roots.setdefault(name, [])
        if key not in roots:
            roots.append(key)
        number = roots.index(key) + 1
        records = dict(_records(model.graph, ("onnx", *key), {}, ""))
        return name if number == 1 else f"{name}#{number}", records


def _class_of(model: Model) -> str:
    """Return the class of the module that a model was exported from, or an empty string."""
    for node in model.graph.all_nodes():
        classes = _listed(node.metadata.get(f"{_TORCH}class_hierarchy", ""))
        if len(classes) > 1:
            return classes[0].rpartition(".")[2]
    return ""


def _records(
    graph: Graph, key: tuple[Any, ...], counts: dict[str, int], around: str
) -> Iterator[tuple[Node, OpRecord]]:
    for node in graph.nodes:
        path = module_path_of(node) or around
        name = f"{path}/{node.operator.__name__}" if path else node.operator.__name__
        count = counts[name] = counts.get(name, 0) + 1
        own = (*key, node.name)
        yield (
            node,
            OpRecord(
                Site(
                    own,
                    node.operator.__name__,
                    NAMESPACE,
                    name if count == 1 else f"{name}#{count}",
                    path,
                    source_of(node),
                )
            ),
        )
        for attribute, body in node.bodies.items() if node.is_open else ():
            yield from _records(body, (*own, attribute), counts, path)


class Finder:
    """Finds the weights that operators read, for `context.weights`.

    A weight of a model is never written, and an input is the whole of it.
    """

    def __init__(self) -> None:
        #: Key of an operator -> its model and its node.
        self._nodes: dict[Any, tuple[weakref.ref[Model], weakref.ref[Node], str]] = {}

    def add(self, model: Model, records: Mapping[Node, OpRecord], root: str) -> None:
        """Note the operators of a model that runs."""
        for node, record in records.items():
            self._nodes[record.site.key] = weakref.ref(model), weakref.ref(node), root

    def __call__(self, context: OpContext) -> Reads:
        """Return the weights that an operator reads, during a call of a routine."""
        of_model, of_node, root = self._nodes[context.site.key]
        model, node, inputs = of_model(), of_node(), context.get_inputs()
        if model is None or node is None or inputs is None:
            return Reads({}, dict, root=root)
        roles: tuple[str, ...] = context.get("input_roles", ())
        found: dict[int | tuple[int, int], Weight] = {}
        this: Any = self  # It answers what `Weight` asks.
        for position, weight in node.weights.items():
            value, shape = model.array(weight), tuple(weight.dims)
            if inputs[position] is not value:
                continue  # The program gives this input another value.
            place = Place((), True, tuple(range(len(shape))))
            get = partial(_array, of_model, weight)
            part = Found(root, weight.name, 0, shape, None, place, get, weight.name)
            role = roles[position] if position < len(roles) else None
            found[position] = Weight(part, value, this, role, False)
        shapes, classes = partial(_shapes, of_model, root), partial(_classes, of_model)
        return Reads(found, shapes, bool(found), root=root, classes=classes)

    def memory(self, value: Any) -> None:
        """Return None: where a weight lies in memory does not matter, as nothing shares it."""

    def version(self, parameter: Any) -> tuple[object, ...]:
        """Return the same for all times, because weights are never written."""
        return (0,)

    def counts_writes(self, value: Any, parameter: Any) -> bool:
        """Return True, because there are none."""
        return True


def _array(reference: weakref.ref[Model], weight: Any) -> Any:
    model = reference()
    return None if model is None else model.array(weight)


def _shapes(reference: weakref.ref[Model], root: str) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight that has axes, by its owner."""
    model = reference()
    if model is None:
        return {}
    weights = model.graph.weights.items()
    return {f"{root}:{name}": tuple(one.dims) for name, one in weights if one.dims}


def _classes(reference: weakref.ref[Model]) -> dict[str, str]:
    """Return the class of each module, by its path."""
    model = reference()
    found: dict[str, str] = {}
    for node in model.graph.all_nodes() if model is not None else ():
        classes = _listed(node.metadata.get(f"{_TORCH}class_hierarchy", ""))
        for path, name in zip(scopes_of(node), classes, strict=False):
            found[path] = name.rpartition(".")[2]
    return found
