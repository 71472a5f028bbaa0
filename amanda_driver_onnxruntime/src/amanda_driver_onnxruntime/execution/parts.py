"""`Values` and `Parts`: the values of a run, and the sessions of parts of a model.

Owns what of a model becomes a session of its own, and how long these sessions are kept.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy
import onnx
from onnx import helper, numpy_helper

from amanda_core.driver_kit import inside_routine
from amanda_driver_onnxruntime import onnxruntime_internals
from amanda_driver_onnxruntime.execution.routines import Fragment
from amanda_driver_onnxruntime.graphs import Graph, Model, Node, copied, same
from amanda_driver_onnxruntime.onnxruntime_internals import (
    OrtValue,
    Part,
    UnknownModelError,
    array_of,
    constant,
    given_options,
    identity,
    is_borrowed,
    is_packed,
    options_of,
    ort_value,
    providers_of,
    type_of,
)
from amanda_driver_onnxruntime.staging import NotStagedError

__all__ = ["Parts", "Values"]

#: Prefix of the names of an operator's inputs in a part of its own.
_INPUT = "amanda.input."


class Values:
    """The values of one run of a graph, as ONNX Runtime has them and as routines see them.

    Args:
        model: The model.
        graph: The graph.
        around: The values of the graph around it.
    """

    def __init__(self, model: Model, graph: Graph, around: Values | None = None) -> None:
        self.model, self.graph, self._around = model, graph, around
        self._own: dict[str, Any] = {}
        self._shown: dict[str, Any] = {}
        #: Name -> the type of a value that is not a tensor.
        self.kinds: dict[str, onnx.TypeProto] = {
            name: kind for name, kind in graph.kinds.items() if kind.WhichOneof("value")
        }

    def put(self, name: str, value: Any, shown: Any = None) -> None:
        """Set a value, in either form, or in both."""
        self._own[name] = value
        self._shown.pop(name, None)
        if shown is not None:
            self._shown[name] = shown

    def drop(self, names: Iterable[str]) -> None:
        """Forget values that nothing reads any more."""
        for name in names:
            self._own.pop(name, None)
            self._shown.pop(name, None)

    def weight(self, name: str) -> onnx.TensorProto | None:
        """Return a weight or constant, unless the program gives another value for it."""
        if name in self._own:
            return None
        found = self.graph.weights.get(name)
        if found is None and self._around is not None:
            return self._around.weight(name)
        return found

    def ort(self, name: str) -> Any:
        """Return a value as ONNX Runtime takes it."""
        if name in self._own:
            value = self._own[name]
            found = ort_value(value)
            if found is not value:
                self._own[name] = found
                self._shown[name] = value
            return found
        if name in self.graph.weights:
            return ort_value(self.shown(name))
        if self._around is None:
            raise KeyError(name)
        return self._around.ort(name)

    def kind(self, name: str, value: Any, lengths: bool) -> onnx.TypeProto:
        """Return the type of a value that a part of the model reads."""
        if name in self.kinds:
            return self.kinds[name]
        if name in self._own or self._around is None:
            return type_of(value, lengths)
        return self._around.kind(name, value, lengths)

    def shown(self, name: str) -> Any:
        """Return a value as routines see it, the same object each time."""
        if name in self._own:
            if name not in self._shown:
                self._shown[name] = array_of(self._own[name])
            return self._shown[name]
        if name in self.graph.weights:
            return self.model.array(self.graph.weights[name])
        if self._around is None:
            raise KeyError(name)
        return self._around.shown(name)


class Parts:
    """The sessions of parts of a model.

    Args:
        model: The model.
        session: The session of the program, whose options they have.
    """

    def __init__(self, model: Model, session: Any) -> None:
        self.model = model
        self._providers = providers_of(session)
        self._given = given_options(session)
        self._known: dict[Any, Part] = {}
        #: Keys of parts that ONNX Runtime makes only for inputs of known lengths.
        self._of_lengths: set[Any] = set()
        #: Key of a node with edited weights -> these weights, and its part.
        self._edited: dict[Any, tuple[dict[str, Any], Part]] = {}
        self._checked = self._given is None or model.is_random
        self._limit = 16 + 4 * sum(1 for _ in model.graph.all_nodes())

    def check(self, session: Any, given: Mapping[str, Any]) -> None:
        """Compare what a session computes with what its model does, once.

        Options may give it other weights or libraries of operators, and do not tell which.

        Args:
            session: The program's session.
            given: Its inputs, which are right.

        Raises:
            UnknownModelError: They differ, or ONNX Runtime cannot run the model with its options.
        """
        if self._checked:
            return
        values, graph = Values(self.model, self.model.graph), self.model.graph
        for name, value in given.items():
            values.put(name, value)
        last = len(graph.nodes)
        with inside_routine():
            theirs = Part(session).run({name: values.ort(name) for name in given}, None)
            try:
                self.run_stretch(values, 0, last, None)
            except Exception as error:  # What ONNX Runtime raises has no class in common.
                raise UnknownModelError(f"sessions whose parts cannot be made ({error})") from error
        self._known.clear()  # It has all weights.
        found = dict(zip(graph.outputs, map(array_of, theirs), strict=True))
        if not all(_same(values.shown(name), one) for name, one in found.items()):
            raise UnknownModelError(
                "sessions that compute something else than their models, "
                "as with SessionOptions.add_initializer"
            )
        self._checked = True

    def run_stretch(self, values: Values, first: int, last: int, run_options: Any) -> None:
        """Run some nodes of a graph after one another, without tools."""
        graph = values.graph
        nodes = graph.nodes[first:last]
        made = {name for node in nodes for name in node.outputs}
        reads = dict.fromkeys(n for node in nodes for n in node.reads if n not in made)
        outputs = [n for node in nodes for n in node.outputs if n in graph.later[last]]
        if not outputs:
            return
        protos = [node.proto for node in nodes]
        key = (id(graph), first, last)
        for name, value in self._run(key, protos, values, reads, outputs, {}, run_options):
            values.put(name, value)
        for dead in graph.dies[first:last]:
            values.drop(dead)

    def run_node(
        self,
        node: Node,
        values: Values,
        edited: Mapping[int, Any],
        packed: set[int],
        run_options: Any,
    ) -> list[Any]:
        """Run one node, and return its outputs by position.

        Args:
            node: The node.
            values: The values that it reads.
            edited: Its inputs that are not those of the graph, by position.
            packed: Positions of those that are weights.
            run_options: The options of the run.
        """
        proto = copied(node.proto)
        given, baked = {}, {}
        for position, value in edited.items():
            # Only this input is another one, even if the node has the same input twice.
            proto.input[position] = f"{_INPUT}{position}"
            if position in packed:
                baked[proto.input[position]] = value
            else:
                given[proto.input[position]] = ort_value(value)
        reads = dict.fromkeys([*filter(None, proto.input), *node.captured])
        outputs = [name for name in node.outputs if name]
        key = (id(node), *edited)
        found = self._run(key, [proto], values, reads, outputs, given, run_options, baked)
        made = dict(found)
        return [made.get(name) for name in node.outputs]

    def run_fragment(
        self, fragment: Fragment, values: Sequence[Any], run_options: Any
    ) -> dict[int, Any]:
        """Run the nodes of a routine, and return the new values by position.

        Raises:
            NotStagedError: ONNX Runtime cannot make a session of them.
        """
        named = {name: ort_value(values[place]) for place, name in fragment.inputs.items()}
        if computed := fragment.computed:
            kinds = {name: type_of(value) for name, value in named.items()}
            key = tuple(kind.SerializeToString() for kind in kinds.values())
            part = fragment.parts.get(key)
            if part is None:
                weights = list(fragment.weights.values())
                model = self.model.part(fragment.nodes, kinds, computed, weights)
                try:
                    part = fragment.parts[key] = self.made(model)
                except Exception as error:  # What ONNX Runtime raises has no class in common.
                    raise NotStagedError(f"ONNX Runtime cannot run its nodes: {error}") from error
            named |= zip(part.outputs, part.run(named, run_options), strict=True)
        return {
            place: array_of(named[one]) if isinstance(one, str) else one
            for place, one in fragment.outputs.items()
        }

    def owned(self, value: Any) -> Any:
        """Return a value for the program, as a value of ONNX Runtime that holds its memory."""
        if isinstance(value, OrtValue) and not is_borrowed(value):
            return value
        array = array_of(value)
        # Texts pass as a constant only, and no kernel takes halves of bytes.
        if isinstance(array, numpy.ndarray) and (array is value or is_packed(array)):
            return self.made(constant(array)).run({}, None)[0]
        if not isinstance(value, OrtValue):
            return value
        kind = type_of(value)
        key = ("identity", kind.SerializeToString())
        part = self._known.get(key) or self._made(key, identity(kind))
        return part.run({"value": value}, None)[0]

    def watched(self, nodes: Iterable[Node]) -> Part | None:
        """Return the session of the model with all inputs and outputs of some nodes as outputs.

        None if ONNX Runtime makes none, as of types that it does not infer.
        """
        graph = self.model.graph
        made = {name for node in graph.nodes for name in node.outputs if name}
        seen = dict.fromkeys(n for node in nodes for n in (*node.inputs, *node.outputs))
        key = ("watched", *(name for name in seen if name in made.difference(graph.outputs)))
        if key not in self._known:
            model = copied(self.model.proto)
            model.graph.output.extend(map(helper.make_empty_tensor_value_info, key[1:]))
            try:
                self._made(key, model)
            except Exception:  # What ONNX Runtime raises has no class in common.
                return None
        return self._known[key]

    def made(
        self, model: onnx.ModelProto, outside: Mapping[str, Any] = MappingProxyType({})
    ) -> Part:
        """Return the session of a part, or of a model with edits."""
        with inside_routine():  # What ONNX Runtime runs to make it belongs to no program.
            options = options_of(self._given, self.model.folder)
            return Part.of(model, options, self._providers, outside)

    def _made(
        self, key: Any, model: onnx.ModelProto, outside: Mapping[str, Any] = MappingProxyType({})
    ) -> Part:
        part = self.made(model, outside)
        if len(self._known) >= self._limit:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = part
        return part

    def _run(
        self,
        key: tuple[Any, ...],
        nodes: list[onnx.NodeProto],
        values: Values,
        reads: Iterable[str],
        outputs: list[str],
        given: Mapping[str, Any],
        run_options: Any,
        baked: Mapping[str, Any] = MappingProxyType({}),
    ) -> Iterable[tuple[str, Any]]:
        """Run nodes as a session; return the names and values of their outputs.

        Args:
            key: What the nodes are.
            nodes: The nodes.
            values: The values that they read.
            reads: The names of these.
            outputs: The names of what is computed.
            given: Other values, by name.
            run_options: The options of the run.
            baked: Values that are weights of the part, by name. ONNX Runtime packs weights
                beforehand, and what it packed may round otherwise than an input.
        """
        reads = [name for name in reads if name not in baked]
        found = {name: values.weight(name) for name in reads if name not in given}
        weights = {name: one for name, one in found.items() if one is not None}
        fed = [name for name in reads if name not in weights]
        feeds = {name: given[name] if name in given else values.ort(name) for name in fed}
        lengths, plain = key in self._of_lengths, key
        kinds = {name: values.kind(name, value, lengths) for name, value in feeds.items()}
        # An edit may change the rank of a value; its lengths are a part of the type only if needed.
        key = (*key, *((name, kind.SerializeToString()) for name, kind in kinds.items()))
        part = self._known.get(key)
        if baked:
            kept, part = self._edited.get(key, ({}, part))
            if not all(_same(one, kept.get(name)) for name, one in baked.items()):
                part = None
        if part is None:
            # A tool may write its array later.
            copies = {name: numpy.array(one) for name, one in baked.items()}
            is_large = sum(one.nbytes for one in copies.values()) > onnxruntime_internals.LARGEST
            proto = onnxruntime_internals.outside if is_large else numpy_helper.from_array
            own = [proto(one, name) for name, one in copies.items()]
            beside = {name: ort_value(one) for name, one in copies.items()} if is_large else {}
            made = self.model.part(nodes, kinds, outputs, [*weights.values(), *own])
            try:
                part = self._made(key, made, beside)
            except Exception:  # What ONNX Runtime raises has no class in common.
                if lengths:
                    raise
                self._of_lengths.add(plain)
                return self._run(plain, nodes, values, reads, outputs, given, run_options, baked)
            if baked:
                self._edited[key] = copies, part
        values.kinds.update(part.kinds)
        return zip(part.outputs, part.run(feeds, run_options), strict=True)


def _same(one: Any, other: Any) -> bool:
    """Return True if two values are the same; those that are no arrays are not compared."""
    arrays = [isinstance(value, numpy.ndarray) for value in (one, other)]
    return same(one, other) if all(arrays) else not any(arrays)
