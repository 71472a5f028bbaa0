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
from amanda_driver_onnxruntime.execution.routines import Fragment
from amanda_driver_onnxruntime.graphs import Graph, Model, Node, copied, same
from amanda_driver_onnxruntime.onnxruntime_internals import sessions, values
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import Part, UnknownModelError
from amanda_driver_onnxruntime.onnxruntime_internals.values import array_of, ort_value, type_of
from amanda_driver_onnxruntime.staging import NotStagedError

__all__ = ["Parts", "Values"]

#: Prefix of the names of an operator's inputs in a part of its own.
_INPUT = "amanda.input."
_NONE: Mapping[str, Any] = MappingProxyType({})


class Values:
    """The values of one run of a graph, as ONNX Runtime has them and as routines see them.

    Attributes:
        model: The model.
        graph: The graph.
        options: The options of the run.
        kinds: Name -> the type of a value that is not a tensor.

    Args:
        around: The values of the graph around it; None for the main graph.
    """

    def __init__(
        self, model: Model, graph: Graph, options: Any, around: Values | None = None
    ) -> None:
        self.model, self.graph, self.options, self._around = model, graph, options, around
        self._own: dict[str, Any] = {}
        self._arrays: dict[str, Any] = {}
        self.kinds: dict[str, onnx.TypeProto] = {
            name: kind for name, kind in graph.kinds.items() if kind.WhichOneof("value")
        }

    def put(self, name: str, value: Any, shown: Any = None) -> None:
        """Set a value of this graph.

        Args:
            name: The name of the value in the graph.
            value: The value as ONNX Runtime or as routines have it.
            shown: The value as routines see it; None to make it of `value` when one asks for it.
        """
        self._own[name] = value
        self._arrays.pop(name, None)
        if shown is not None:
            self._arrays[name] = shown

    def drop(self, names: Iterable[str]) -> None:
        """Forget values that nothing reads any more."""
        for name in names:
            self._own.pop(name, None)
            self._arrays.pop(name, None)

    def _scope(self, name: str) -> Values:
        """Return the values of the innermost graph that has the value of this name.

        Raises:
            KeyError: No graph has it.
        """
        found = self
        while name not in found._own and name not in found.graph.weights:
            if found._around is None:
                raise KeyError(name)
            found = found._around
        return found

    def weight(self, name: str) -> onnx.TensorProto | None:
        """Return the weight or constant of this name; None for any other value.

        A weight for which the program gives another value counts as such a value.
        """
        scope = self._scope(name)
        return None if name in scope._own else scope.graph.weights[name]

    def ort(self, name: str) -> Any:
        """Return a value as ONNX Runtime takes it."""
        scope = self._scope(name)
        if name not in scope._own:
            return ort_value(scope.shown(name))
        value = scope._own[name]
        found = ort_value(value)
        if found is not value:
            scope.put(name, found, value)
        return found

    def kind(self, name: str, lengths: bool) -> onnx.TypeProto:
        """Return the type of a value that a part of the model reads, as `type_of` does."""
        scope = self._scope(name)
        return scope.kinds.get(name) or type_of(scope.ort(name), lengths)

    def shown(self, name: str) -> Any:
        """Return a value as routines see it, the same object each time."""
        scope = self._scope(name)
        if name not in scope._own:
            return self.model.array(scope.graph.weights[name])
        if name not in scope._arrays:
            scope._arrays[name] = array_of(scope._own[name])
        return scope._arrays[name]


class Parts:
    """The sessions of parts of a model.

    Args:
        model: The model.
        settings: The options and providers of the program's session.
    """

    def __init__(self, model: Model, settings: sessions.Settings) -> None:
        self.model, self._settings = model, settings
        #: Key of a part -> its session, and the edited weights in it.
        self._known: dict[Any, tuple[Part, Mapping[str, Any]]] = {}
        #: Keys of parts that ONNX Runtime makes only for inputs of known lengths.
        self._of_lengths: set[Any] = set()
        self._checked = settings.given is None or model.is_random
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
        feeds = {name: ort_value(value) for name, value in given.items()}
        with inside_routine():
            theirs = Part(session).run(feeds, None)
            try:
                own = self.made(self.model.proto).run(feeds, None)
            except Exception as error:  # What ONNX Runtime raises has no class in common.
                raise UnknownModelError(f"sessions whose parts cannot be made ({error})") from error
        if not all(map(_same, map(array_of, own), map(array_of, theirs))):
            raise UnknownModelError(
                "sessions that compute something else than their models, "
                "as with SessionOptions.add_initializer"
            )
        self._checked = True

    def run_stretch(self, own: Values, first: int, last: int) -> None:
        """Run the nodes from `first` up to and without `last` in one session, without tools.

        Args:
            own: The values of the graph. The outputs that later nodes read are put there.
            first: Index of the first node in `Graph.nodes`.
            last: Index after the last one.
        """
        graph = own.graph
        nodes = graph.nodes[first:last]
        made = {name for node in nodes for name in node.outputs}
        reads = dict.fromkeys(n for node in nodes for n in node.reads if n not in made)
        outputs = [n for node in nodes for n in node.outputs if n in graph.later[last]]
        if outputs:
            protos = [node.proto for node in nodes]
            for pair in self._run((id(graph), first, last), protos, own, reads, outputs):
                own.put(*pair)
            for dead in graph.dies[first:last]:
                own.drop(dead)

    def run_node(
        self, node: Node, own: Values, edited: Mapping[int, Any], packed: set[int]
    ) -> list[Any]:
        """Run one node, and return its outputs by position.

        Args:
            node: The node.
            own: The values that it reads.
            edited: Position of an input -> its value in the place of the graph's.
            packed: Those of these positions that are weights.

        Returns:
            The outputs by position; None for one that the node leaves out.
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
        found = self._run((id(node), *edited), [proto], own, reads, outputs, given, baked)
        made = dict(found)
        return [made.get(name) for name in node.outputs]

    def run_fragment(
        self, fragment: Fragment, given: Sequence[Any], options: Any
    ) -> dict[int, Any]:
        """Run the nodes of a routine on some values, and return the new ones by position.

        Args:
            fragment: The nodes.
            given: The values that the routine gets.
            options: The options of the run.

        Raises:
            NotStagedError: ONNX Runtime cannot make a session of them.
        """
        named = {name: ort_value(given[place]) for place, name in fragment.inputs.items()}
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
            named |= zip(part.outputs, part.run(named, options), strict=True)
        return {
            place: array_of(named[one]) if isinstance(one, str) else one
            for place, one in fragment.outputs.items()
        }

    def owned(self, value: Any) -> Any:
        """Return a value that the program may keep, as an `OrtValue` that owns its memory.

        It is copied if it is an array, or borrows the memory of one.
        """
        if values.is_text(value):  # Only a model can make a value of strings.
            return self.made(values.constant(value)).run({}, None)[0]
        return values.owned(value)

    def watched(self, nodes: Iterable[Node]) -> Part | None:
        """Return the session of the model with all inputs and outputs of some nodes as outputs.

        Returns:
            The session; None if ONNX Runtime cannot make it, as with types that it does not infer.
        """
        graph = self.model.graph
        made = {name for node in graph.nodes for name in node.outputs if name}
        seen = dict.fromkeys(n for node in nodes for n in (*node.inputs, *node.outputs))
        key = ("watched", *(name for name in seen if name in made.difference(graph.outputs)))
        if key not in self._known:
            model = copied(self.model.proto)
            model.graph.output.extend(map(helper.make_empty_tensor_value_info, key[1:]))
            try:
                self._keep(key, self.made(model))
            except Exception:  # What ONNX Runtime raises has no class in common.
                return None
        return self._known[key][0]

    def made(self, model: onnx.ModelProto, outside: Mapping[str, Any] = _NONE) -> Part:
        """Return the session of a part, or of a model with edits.

        Args:
            model: The part or the model.
            outside: Name of a weight -> its value, for weights whose values are not in `model`.
        """
        with inside_routine():  # What ONNX Runtime runs to make it belongs to no program.
            return self._settings.part(model, outside)

    def _keep(self, key: Any, part: Part, baked: Mapping[str, Any] = _NONE) -> Part:
        if len(self._known) >= self._limit:
            self._known.pop(next(iter(self._known)), None)
        self._known[key] = part, baked
        return part

    def _run(
        self,
        key: tuple[Any, ...],
        nodes: list[onnx.NodeProto],
        own: Values,
        reads: Iterable[str],
        outputs: list[str],
        given: Mapping[str, Any] = _NONE,
        baked: Mapping[str, Any] = _NONE,
    ) -> Iterable[tuple[str, Any]]:
        """Run nodes as a session; return the names and values of their outputs.

        Args:
            key: Identifies the nodes and the positions of edited inputs.
            nodes: The nodes.
            own: The values that they read.
            reads: The names of these.
            outputs: The names of what is computed.
            given: Other values, by name.
            baked: Values that are weights of the part, by name. ONNX Runtime packs weights
                beforehand, and what it packed may round otherwise than an input.
        """
        found = {name: own.weight(name) for name in reads if name not in {*given, *baked}}
        weights = [one for one in found.values() if one is not None]
        feeds = {**given, **{name: own.ort(name) for name, one in found.items() if one is None}}
        lengths = key in self._of_lengths
        kinds = {
            name: type_of(value, lengths) if name in given else own.kind(name, lengths)
            for name, value in feeds.items()
        }
        # An edit may change the rank of a value; its lengths are a part of the type only if needed.
        full = (*key, *((name, kind.SerializeToString()) for name, kind in kinds.items()))
        part, kept = self._known.get(full, (None, _NONE))
        if part is None or not all(_same(one, kept.get(name)) for name, one in baked.items()):
            # A tool may write its array later.
            copies = {name: numpy.array(one) for name, one in baked.items()}
            is_large = sum(one.nbytes for one in copies.values()) > sessions.LARGEST
            proto = values.outside if is_large else numpy_helper.from_array
            weights += [proto(one, name) for name, one in copies.items()]
            beside = {name: ort_value(one) for name, one in copies.items()} if is_large else {}
            try:
                model = self.model.part(nodes, kinds, outputs, weights)
                part = self._keep(full, self.made(model, beside), copies)
            except Exception:  # What ONNX Runtime raises has no class in common.
                if lengths:
                    raise
                self._of_lengths.add(key)
                return self._run(key, nodes, own, reads, outputs, given, baked)
        own.kinds.update(part.kinds)
        return zip(part.outputs, part.run(feeds, own.options), strict=True)


def _same(one: Any, other: Any) -> bool:
    """Return True if two arrays are the same, or if neither value is an array."""
    arrays = [isinstance(value, numpy.ndarray) for value in (one, other)]
    return same(one, other) if all(arrays) else not any(arrays)
