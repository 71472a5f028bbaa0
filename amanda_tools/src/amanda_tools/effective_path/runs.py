"""Conversion of one run to a network: its operators in order, with their values.

Decides which values depend on the input, which operators together are one layer, and where paths
start. NumPy is imported only when needed.
"""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_core.facts import DENSE, Facts, NotReadableError
from amanda_tools.effective_path.model import WEIGHTED, LayerRule, Node, PathEnd, Unsuited
from amanda_tools.graph.values import Port
from amanda_tools.tensors.values import host, numbers

__all__ = ["Execution", "Network", "Run", "array_of"]


def array_of(facts: Facts, value: Any) -> Any:
    """Return a copy of a tensor's values as a NumPy array, and anything else unchanged.

    A tensor without a plain array of values is returned unchanged as well; no rule uses it as an
    operand.
    """
    if not facts.is_tensor(value) or facts.layout(value) != DENSE:
        return value
    try:
        held = host(facts, value)
    except NotReadableError:
        return value
    return numbers(held.array, held.dtype)


@dataclass
class Execution:
    """One execution of an operator.

    Attributes:
        name: Readable name of the operator.
        type: Common type of the operator, or the framework's.
        rule: How paths go through it; None if they do not.
        inputs: Origins of the tensors at each input position.
        constant: Input positions whose value does not change between runs.
        given: Inputs and attributes by name; tensors that are not operands are arrays.
        outputs: Ports of its outputs.
        output: Port of its first output; None if that is not a tensor.
        weight: Its weight as an array.
        weight_key: The parameter, or the part of it, that the weight is; None if it is none.
        order: Its number among the executions of the run; in a graph, the number of its operator.
        program: Number of the graph or function body that contains it; None in eager modes.
    """

    name: str
    type: str
    rule: LayerRule | None
    inputs: list[list[Port]] = field(default_factory=list)
    constant: frozenset[int] = frozenset()
    given: dict[str, Any] = field(default_factory=dict)
    outputs: list[Port] = field(default_factory=list)
    output: Port | None = None
    weight: Any = None
    weight_key: str | None = None
    order: int = 0
    program: int | None = None

    def ports(self, positions: Sequence[int] | None = None) -> list[Port]:
        """Return the origins of the tensors at these input positions, or at all of them."""
        if positions is None:
            return list(itertools.chain.from_iterable(self.inputs))
        return [port for at in positions if at < len(self.inputs) for port in self.inputs[at]]


@dataclass
class Run:
    """Executions since the end of the previous run.

    Attributes:
        executions: The executions, each after those whose values it takes.
        arrays: Values of operands and outputs.
        made: Values that operators produced.
        fixed: Values that no operator produced and that are not an input of the network.
        unseen: Values whose producer was not seen or not followed.
        writes: Number of an execution that wrote an input in place -> the end of paths there.
    """

    executions: list[Execution] = field(default_factory=list)
    arrays: dict[Port, Any] = field(default_factory=dict)
    made: set[Port] = field(default_factory=set)
    fixed: set[Port] = field(default_factory=set)
    unseen: dict[Port, PathEnd] = field(default_factory=dict)
    writes: dict[int, PathEnd] = field(default_factory=dict)


class Network:
    """A run as nodes from which paths can be extracted.

    Args:
        run: The run.
        output: Pattern of the name of the operator at which paths start; None for the last one with
            a two-dimensional output.

    Attributes:
        nodes: The nodes in order.
        values: Number -> array.
        names: Number of a value -> name of the operator that produced it, or ``input``.
        ended: Number of a value -> why paths end at its producer.
        logits: Number of the value at which paths start; None if there is none.
    """

    def __init__(self, run: Run, output: str | None) -> None:
        self.nodes: list[Node] = []
        self.values: dict[int, Any] = {}
        self.names: dict[int, str] = {}
        self._taken: set[str] = set()
        self.ended: dict[int, PathEnd] = {}
        self.logits: int | None = None
        self._run = run
        self._numbers: dict[Port, int] = {}
        #: Values that do not depend on the network's input.
        self._fixed = set(run.fixed)
        #: Values that depend, or may depend, on a layer with a weight.
        self._behind: set[Port] = set(run.unseen)
        self._makers: dict[int, Node] = {}
        self._takers: dict[Port, int] = {}
        #: Nodes that already include a shift, and normalizations made of shifts and scales.
        self._shifted: set[str] = set()
        #: Values whose first axis merges this many samples with another axis.
        self._merged: dict[Port, int] = {}
        #: Roots of sums: what divides by them, or multiplies by their reciprocals, normalizes.
        self._roots: set[Port] = set()
        self._scaled: set[str] = set()
        for execution in run.executions:
            for port in execution.ports():
                self._takers[port] = self._takers.get(port, 0) + 1
        for execution in run.executions:
            self._add(execution)
            if execution.output is None or execution.output in self._fixed:
                continue
            number = self._numbers.get(execution.output)
            begins = (
                number in self._makers and self.values[number].ndim == 2
                if output is None
                else number is not None and fnmatch.fnmatchcase(execution.name, output)
            )
            if begins:
                self.logits = number
        for port, end in run.unseen.items():
            if port in self._numbers:
                self.ended[self._numbers[port]] = end
        self._name_inputs()

    def stops(self) -> list[PathEnd]:
        """Return the ends that paths may reach at which something is missing from them."""
        reached = {self.logits}
        for node in reversed(self.nodes):
            if node.output in reached:
                reached.update(node.inputs)
        return [end for number, end in self.ended.items() if number in reached and end.lost]

    def kind_of(self, number: int) -> str:
        """Return the kind of a value at which paths end: ``end`` or ``input``."""
        return "end" if number in self.ended and self.ended[number].lost else "input"

    def _add(self, execution: Execution) -> None:
        ports = execution.ports()
        known = set(execution.ports(sorted(execution.constant)))
        is_layer = execution.rule is not None and execution.rule.kind in WEIGHTED
        # The operand of a layer is an input of the network, even if its gradient is requested.
        is_fixed = all(port in self._fixed or port in known for port in ports)
        if ports and not is_layer and is_fixed:
            self._fixed.update(execution.outputs)
            return
        self._fixed.update(port for port in known if port not in self._numbers)
        # Operators before the first layer, such as a normalization, produce the input.
        is_behind = not self._behind.isdisjoint(ports)
        if execution.type in _ROOTS:
            self._roots.update(execution.outputs)
        try:
            self._node(execution)
            splits = execution.rule is not None and execution.rule.kind == "split"
            others = [] if splits else [p for p in execution.outputs if p != execution.output]
            reason = "only its first output is followed"
        except Unsuited as error:
            others, reason = execution.outputs, str(error)
        # An operator without a tensor input produces an input.
        for port in others if ports else ():
            end = PathEnd(execution.name, execution.type, reason, is_behind or is_layer)
            self.ended[self._number(port)] = end
        if is_layer or is_behind:
            self._behind.update(execution.outputs)

    def _node(self, execution: Execution) -> None:
        import numpy as np

        rule, output = execution.rule, execution.output
        if rule is None or output is None:
            raise Unsuited(f"there is no rule for {execution.type}")
        weights = [] if rule.weight is None else execution.ports([rule.weight])
        kind, operands = rule.kind, execution.ports(rule.operands)
        if any(port in self._behind or self._is_made(port) for port in weights):
            if execution.type != "matmul" or len(execution.ports()) > 2:
                raise Unsuited("its weight depends on the input")
            kind, operands = "product", operands + weights
        elif kind not in WEIGHTED:
            operands = [port for port in operands if port not in self._fixed]
        if kind in ("add", "shift", "scale"):
            operands = [port for port in operands if not self._is_of_all(port, output)]
        if kind == "scale" and len(operands) > 1:
            kind, operands = self._scaling(execution, operands)
        if kind == "concat":
            operands = [port for port in operands if _size(self._run.arrays.get(port)) != 0]
        result = self._array(output)
        arrays: list[Any] = [self._array(port) for port in operands]
        if kind == "product" and len(weights) == 1:
            arrays[-1] = execution.weight if arrays[-1] is None else arrays[-1]
        if result is None or any(array is None for array in arrays) or not arrays:
            raise Unsuited("its values are not floating-point numbers")
        if kind == "add" and len(operands) == 1:
            kind = "shift"
        changes = rule.is_view and arrays[0].shape[:1] != result.shape[:1]
        if changes or not self._merged.keys().isdisjoint(operands):
            result = self._merge(rule, kind, output, arrays, result)
        if kind in ("shift", "scale"):
            if arrays[0].shape != result.shape:
                raise Unsuited("its output has another shape than its input")
            arguments: dict[str, Any] = {}
        elif kind in ("product", "gate"):
            arguments = {}
            if kind == "product" and any(array.ndim < 2 for array in arrays):
                raise Unsuited("one of its factors is a vector")
        elif rule.is_view:
            arguments = {}
        else:
            if not all(array.ndim for array in arrays):
                raise Unsuited("one of its inputs has no axis of samples")
            arguments = rule.arguments(execution.given, arrays, result)
            if rule.weight is not None:
                weight = execution.weight
                if not isinstance(weight, np.ndarray) or weight.ndim != len(arguments["layout"]):
                    raise Unsuited("its weight is not a matrix")
                arguments["weight"] = weight if weight.dtype.kind == "f" else weight.astype(float)
                arguments["weight_key"] = execution.weight_key
        if kind == "concat":
            arguments["parts"] = self._parts(execution, operands, arguments["axis"])
        if any(array.shape[:1] != result.shape[:1] for array in arrays) or not result.ndim:
            raise Unsuited("one of its inputs has other samples than its output")
        numbers = tuple(self._number(port) for port in operands)
        for number, array in zip(numbers, arrays, strict=True):
            self.values[number] = np.asarray(array, float)
        if kind == "split":
            self._split(execution, numbers[0], arguments)
            return
        if kind in ("shift", "scale"):
            before = self._makers.get(numbers[0])
            if before is not None and self._takers[operands[0]] == 1 and self._joins(before, kind):
                self._numbers[output] = numbers[0]
                self.values[numbers[0]] = np.asarray(result, float)
                return
        node = self._made(
            execution,
            "batch_norm" if kind in ("shift", "scale") else kind,
            numbers,
            output,
            arguments,
            result,
        )
        if kind in ("shift", "scale"):
            self._scaled.add(node.name)

    def _made(
        self,
        execution: Execution,
        kind: str,
        inputs: tuple[int, ...],
        output: Port,
        arguments: Mapping[str, Any],
        result: Any,
    ) -> Node:
        """Add a node for an output of an execution."""
        import numpy as np

        number = self._number(output)
        node = Node(self._named(number, execution.name), kind, inputs, number, arguments)
        self.nodes.append(node)
        self._makers[number] = node
        self.values[number] = np.asarray(result, float)
        return node

    def _array(self, port: Port) -> Any:
        """Return a value with the samples along the first axis, also if it merges that axis."""
        array, samples = self._run.arrays.get(port), self._merged.get(port)
        if array is None or samples is None:
            return array
        return array.reshape(samples, -1, *array.shape[1:])

    def _merge(
        self,
        rule: LayerRule,
        kind: str,
        output: Port,
        arrays: Sequence[Any],
        result: Any,
    ) -> Any:
        """Return a result of values whose first axis merges samples, or that merges them itself."""
        if not all(array.ndim for array in arrays):
            raise Unsuited("one of its inputs is a scalar, which has no samples")
        (samples, *others) = {len(array) for array in arrays}
        passes = rule.is_view or kind in ("linear", "shift", "scale", "add", "gate", "reshape")
        fits = result.ndim and samples and len(result) % samples == 0
        if others or not passes or not fits or (rule.is_view and result.size != arrays[0].size):
            raise Unsuited("it changes the axis of samples, or works on one that was merged")
        if len(result) == samples:
            return result
        self._merged[output] = samples
        return self._array(output)

    def _scaling(self, execution: Execution, operands: list[Port]) -> tuple[str, list[Port]]:
        """Return the kind and operands of a product or quotient of values that depend on the
        input: a normalization by a root, or a gate.
        """
        first = execution.ports([0])
        roots = [port for port in operands if port in self._roots]
        others = [port for port in operands if port not in self._roots]
        if execution.type == "div" and operands[1:] != roots:
            raise Unsuited("it divides by what depends on the network's input")
        if execution.type == "div":
            return "scale", first
        return ("scale", others) if len(others) == 1 else ("gate", operands)

    def _parts(self, execution: Execution, operands: Sequence[Port], axis: int) -> list[int]:
        """Return where the operands of a concatenation start along its axis."""
        start, parts = 0, []
        for port in execution.ports(execution.rule.operands if execution.rule else ()):
            array = self._run.arrays.get(port)
            if array is None:
                raise Unsuited("its values are not floating-point numbers")
            if port in operands:
                parts.append(start)
            start += array.shape[axis] if array.size else 0
        return parts

    def _split(self, execution: Execution, taken: int, arguments: Mapping[str, Any]) -> None:
        """Add a slice for each output of an execution that splits its input along an axis."""
        import numpy as np

        x, axis, start = self.values[taken], arguments["axis"], 0
        places = np.arange(x.size).reshape(x.shape)
        for port in execution.outputs:
            result = self._run.arrays.get(port)
            if result is None:
                raise Unsuited("its values are not floating-point numbers")
            length = 1 if arguments["unbinds"] else result.shape[axis]
            own = places.take(np.arange(start, start + length), axis=axis).reshape(result.shape)
            self._made(execution, "slice", (taken,), port, {"places": own}, result)
            start += length

    def _is_of_all(self, port: Port, output: Port) -> bool:
        """Return True if a value before any layer is the same for all samples, such as noise."""
        value, result = self._run.arrays.get(port), self._run.arrays.get(output)
        if port in self._behind or value is None or result is None:
            return False
        return bool(value.shape[:1] != result.shape[:1] or value.ndim != result.ndim)

    def _is_made(self, port: Port) -> bool:
        return self._numbers.get(port) in self._makers

    def _joins(self, before: Node, kind: str) -> bool:
        """Return True if a shift or scale is part of the layer before it.

        A bias belongs to its layer, and consecutive shifts and scales are one normalization.
        """
        if before.name in self._scaled:
            return True
        if kind == "shift" and before.kind in WEIGHTED and before.name not in self._shifted:
            self._shifted.add(before.name)
            return True
        return False

    def _number(self, port: Port) -> int:
        return self._numbers.setdefault(port, len(self._numbers))

    def _named(self, number: int, name: str) -> str:
        """Give a value a name, with a number if the name is taken."""
        count, unique = 1, name
        while unique in self._taken:
            count += 1
            unique = f"{name}#{count}"
        self._taken.discard(self.names.get(number, ""))
        self._taken.add(unique)
        self.names[number] = unique
        return unique

    def _name_inputs(self) -> None:
        """Name the values that no layer produced and that the path may reach."""
        reached = {self.logits}
        for node in reversed(self.nodes):
            if node.output in reached:
                reached.update(node.inputs)
        for number in sorted(number for number in reached if number is not None):
            if number not in self.names:
                is_end = self.kind_of(number) == "end"
                self._named(number, self.ended[number].name if is_end else "input")


#: Operators whose output normalizes what is multiplied with it or divided by it.
_ROOTS = frozenset({"sqrt", "rsqrt", "std"})


def _size(array: Any) -> int:
    return -1 if array is None else int(array.size)


def elements(values: Mapping[int, Any], number: int) -> int:
    """Return the number of elements of a value in one sample."""
    return int(values[number][0].size) if len(values[number]) else 0
