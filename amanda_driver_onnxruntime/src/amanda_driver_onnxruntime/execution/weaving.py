"""`woven`: the model with the edits of tools in it, as one model.

Owns where edits stand: those of weights in the weights, others as nodes beside the operators. It
runs nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import onnx
from onnx import AttributeProto, helper, numpy_helper

from amanda_core.driver_kit import Step
from amanda_driver_onnxruntime.execution.routines import Done, Fragment, Host, Outcome
from amanda_driver_onnxruntime.graphs import Graph, Model, Node, copied, every_graph, same

__all__ = ["NotWovenError", "Planned", "woven"]

#: Returns the plans of a node before and after, with the outcomes of their steps; None without any.
Planned = Callable[[Node], Sequence[Done] | None]
#: Position -> the name of a value there, or a constant.
Places = dict[int, Any]


class NotWovenError(Exception):
    """A step is not a part of the model.

    Attributes:
        where: What the step is.
        fix: What to do.

    Args:
        step: The step.
        why: Why it is not.
    """

    def __init__(self, step: Step, why: str) -> None:
        super().__init__(why)
        self.where = step.where
        staged = "compute with NumPy's functions on what it gets; or let it edit weights alone"
        self.fix = f"Mark it with amanda.staged, and {staged}"
        if step.action.staged:
            self.fix = f"With version 21 of ONNX's operators, {staged}"


def woven(model: Model, planned: Planned, bakes: bool) -> tuple[onnx.ModelProto, bool]:
    """Return a model with the edits of its operators.

    Args:
        model: The model, which does not change.
        planned: Returns the plans of a node.
        bakes: Whether what routines on the host make of weights is constant, and those that look
            are left out.

    Returns:
        The model, and whether it is only for inputs of the lengths of its last run.

    Raises:
        NotWovenError: A routine must run on the host.
    """
    weaver = _Weaver(model, planned, bakes)
    return weaver.proto, weaver.reads_shape


class _Weaver:
    """The model with edits while it is made.

    Attributes:
        proto: The model.
        reads_shape: Whether a routine has asked for the shape of what it got.
    """

    def __init__(self, model: Model, planned: Planned, bakes: bool) -> None:
        self.proto: onnx.ModelProto = copied(model.proto)
        self.reads_shape = False
        self._planned, self._bakes, self._prefix = planned, bakes, model.prefix
        #: Weight -> what stands for it where it is read with other values, and these.
        self._edits: dict[str, dict[str, Any]] = {}
        self._known: dict[Any, str] = {}
        self._graph(self.proto.graph, model.graph)
        read, names = set(_reads(self.proto.graph)), dict[str, str]()
        for name, edits in self._edits.items():
            names |= self._set_weight(name, edits, name in read)
        for own in every_graph(self.proto.graph):
            _set_inputs(own.node, names)
        _drop(self.proto.graph, {*_reads(model.proto.graph)} - {*_reads(self.proto.graph)})

    def _graph(self, proto: onnx.GraphProto, graph: Graph) -> None:
        own = {node.index for node in graph.nodes}
        nodes = [one for index, one in enumerate(proto.node) if index not in own]
        for node in graph.nodes:
            one = proto.node[node.index]
            for attribute in one.attribute:
                if attribute.type == AttributeProto.GRAPH:
                    self._graph(attribute.g, node.bodies[attribute.name])
            planned = self._planned(node)
            nodes += [one] if planned is None else self._surrounded(one, node, *planned)
            if planned is not None and planned[1][0]:
                kept = [info for info in proto.value_info if info.name not in node.outputs]
                del proto.value_info[:]
                proto.value_info.extend(kept)
        copies = [copied(one) for one in nodes]
        del proto.node[:]
        proto.node.extend(copies)

    def _surrounded(
        self, one: onnx.NodeProto, node: Node, before: Done, after: Done
    ) -> list[onnx.NodeProto]:
        """Return the nodes of an operator with the routines before and after it."""
        plan, outcomes = before
        inputs: Places = dict(enumerate(node.inputs))
        nodes = self._steps(plan.steps, outcomes[: len(plan)], inputs)
        outputs: Places = dict(enumerate(node.outputs))
        if plan.replacement is not None:
            results: Places = {}
            last = self._steps([plan.replacement], outcomes[len(plan) :], inputs, results)
            nodes, outputs = nodes + last, {n: results.get(n, "") for n in outputs}
        else:
            for place, value in inputs.items():
                if isinstance(value, str):
                    one.input[place] = value
                else:
                    edits = self._edits.setdefault(node.inputs[place], {})
                    one.input[place] = f"{self._prefix}/{len(edits)}/{node.inputs[place]}"
                    edits[one.input[place]] = value
            nodes.append(one)
        ends = self._steps(after[0].steps, after[1], outputs)
        nodes += ends
        changed = {n: v for n, v in outputs.items() if v is not node.outputs[n] and node.outputs[n]}
        if plan.replacement is None:
            for place, name in enumerate(node.outputs):
                if place in changed:  # What reads it gets the new value under this name.
                    raw = f"{self._prefix}/{name}/original"
                    one.output[place] = raw
                    _set_inputs(ends, {name: raw})
                    if isinstance(changed[place], str) and changed[place] == name:
                        changed[place] = raw
        for place, value in changed.items():
            name = value if isinstance(value, str) else self._weight(value)
            made = f"{self._prefix}/{node.outputs[place]}/Identity"
            nodes.append(helper.make_node("Identity", [name], [node.outputs[place]], made))
        return nodes

    def _steps(
        self,
        steps: Sequence[Step],
        outcomes: Sequence[Outcome],
        values: Places,
        results: Places | None = None,
    ) -> list[onnx.NodeProto]:
        """Return the nodes of steps, and set the values that they change.

        Args:
            steps: The steps.
            outcomes: What is known of each.
            values: The values that they get.
            results: The values that they set, if these are others.
        """
        nodes: list[onnx.NodeProto] = []
        for step, outcome in zip(steps, outcomes, strict=True):
            changes: Mapping[int, Any] = {}
            if outcome is None and not self._bakes:
                raise NotWovenError(step, "it looks at values of each execution")
            if isinstance(outcome, Host):
                if not self._bakes or outcome.constants is None:
                    raise NotWovenError(step, outcome.why)
                changes = outcome.constants
            elif isinstance(outcome, Fragment):
                self.reads_shape |= outcome.reads_shape
                given = {
                    name: values[place]
                    if isinstance(values[place], str)
                    else self._weight(values[place])
                    for place, name in outcome.inputs.items()
                }
                copies = [copied(one) for one in outcome.nodes]
                _set_inputs(copies, given)
                nodes += copies
                for name, weight in outcome.weights.items():
                    self._add(name, weight)
                changes = {
                    place: given.get(new, new) if isinstance(new, str) else new
                    for place, new in outcome.outputs.items()
                }
            (values if results is None else results).update(changes)
        return nodes

    def _weight(self, value: Any) -> str:
        """Return the name of a new weight with some values."""
        key = value.dtype.name, value.shape, value.tobytes()
        if key not in self._known:
            self._known[key] = name = f"{self._prefix}/constant{len(self._known)}"
            self._add(name, numpy_helper.from_array(value, name))
        return self._known[key]

    def _add(self, name: str, weight: onnx.TensorProto) -> None:
        if any(one.name == name for one in self.proto.graph.initializer):
            return
        self.proto.graph.initializer.add().CopyFrom(weight)  # `append` fails over 2 GiB.
        if self.proto.ir_version < 4:  # There, each weight is an input, too.
            kind = helper.make_tensor_type_proto(weight.data_type, list(weight.dims))
            self.proto.graph.input.append(helper.make_value_info(name, kind))

    def _set_weight(self, name: str, edits: Mapping[str, Any], is_read: bool) -> dict[str, str]:
        """Give a weight new values, or those that read it new weights; return their names.

        Args:
            name: The weight.
            edits: What stands for it where it is read with other values, and these.
            is_read: Whether it is also read with its own values.
        """
        weight = next((w for w in self.proto.graph.initializer if w.name == name), None)
        first = next(iter(edits.values()))
        if weight is not None and not is_read and all(same(first, e) for e in edits.values()):
            weight.CopyFrom(numpy_helper.from_array(first, name))
            return dict.fromkeys(edits, name)
        known: list[tuple[Any, str]] = []
        names: dict[str, str] = {}
        for place, value in edits.items():
            found = next((new for other, new in known if same(value, other)), None)
            if found is None:
                found = f"{self._prefix}/{name}/edited{len(known) or ''}"
                known.append((value, found))
                self._add(found, numpy_helper.from_array(value, found))
            names[place] = found
        return names


def _drop(graph: onnx.GraphProto, names: set[str]) -> None:
    """Leave out weights and constants, also in the graphs inside."""
    for own in every_graph(graph):
        gone = names - {one.name for one in own.input}
        for index in reversed(range(len(own.initializer))):
            if own.initializer[index].name in gone:
                del own.initializer[index]
        for index in reversed(range(len(own.node))):
            if own.node[index].op_type == "Constant" and own.node[index].output[0] in names:
                del own.node[index]


def _set_inputs(nodes: Iterable[onnx.NodeProto], names: Mapping[str, str]) -> None:
    """Let nodes read other values."""
    for node in nodes:
        node.input[:] = [names.get(one, one) for one in node.input]


def _reads(graph: onnx.GraphProto) -> Iterator[str]:
    """Yield the names that a graph and those inside it read, and their outputs."""
    for own in every_graph(graph):
        for node in own.node:
            yield from node.input
        yield from (one.name for one in own.output)
