"""Conversion of one run to a network: its operators in order, with their values.

Decides which values depend on the input, which operators together are one layer, and where paths
start. NumPy is imported only when needed. A little over 400 lines: one pass over a run.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from amanda_tools.effective_path.model import WEIGHTED, LayerRule, Node, PathEnd, Unsuited
from amanda_tools.effective_path.runs import Execution, Run
from amanda_tools.graph.values import Port

__all__ = ["Network", "elements"]


@dataclass
class _Draft:
    """A node that is being made of an execution.

    Attributes:
        execution: The execution.
        rule: How paths go through it.
        kind: Kind of the node; also ``shift``, ``scale`` and ``split``.
        operands: Ports of the values through which paths go on.
        weights: Ports of its weight, which are operands too if they depend on the input.
        output: Port of its output.
        arrays: Values of the operands.
        result: Value of the output.
    """

    execution: Execution
    rule: LayerRule
    kind: str
    operands: list[Port]
    weights: list[Port]
    output: Port
    arrays: list[Any] = field(default_factory=list)
    result: Any = None

    @property
    def is_elementwise(self) -> bool:
        """Return True for what may be part of a normalization."""
        return self.kind in ("shift", "scale")


class Network:
    """A run as nodes from which paths can be extracted.

    Args:
        run: The run.
        output: Pattern of the name of the operator at which paths start; None for the last one that
            depends on a layer.
        start: Position of the tokens at which paths start, where the output has three axes.

    Attributes:
        nodes: The nodes in order.
        values: Number -> array.
        names: Number of a value -> name of the operator that produced it, or ``input``.
        ended: Number of a value -> why paths end at its producer.
        logits: Number of the value at which paths start; None if there is none.
        why: Why there is none.
    """

    def __init__(self, run: Run, output: str | None, start: int = -1) -> None:
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
                number in self._makers and execution.output in self._behind
                if output is None
                else number is not None and fnmatch.fnmatchcase(execution.name, output)
            )
            if begins:
                self.logits = number
        self.why = self._unfit(output, start)
        if self.why:
            self.logits = None
        for port, end in run.unseen.items():
            if port in self._numbers:
                self.ended[self._numbers[port]] = end
        self._name_inputs()

    def _unfit(self, output: str | None, start: int) -> str:
        """Return why paths cannot start at the value that was chosen, or an empty string."""
        if self.logits is None:
            return f"no operator that is followed is named {output!r}" if output else ""
        node, value = self._makers.get(self.logits), self.values.get(self.logits)
        if value is None:
            return f"{self.names.get(self.logits, output)} is not followed"
        if value.ndim == 3 and value.size and not -value.shape[1] <= start < value.shape[1]:
            return f"start is {start}, but {value.shape[1]} tokens came out"
        scores = value.ndim == 2 or (value.ndim == 3 and node is not None and node.kind != "conv")
        if output is None and not scores:
            name = self.names.get(self.logits, "the output")
            return f"{name} is the last operator, but its output has the shape {value.shape}, " + (
                "which are not scores of classes or tokens; name another one by output="
            )
        return ""

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
        """Add the node of an execution, or make it part of the node before it.

        Raises:
            Unsuited: Paths do not go through it.
        """
        draft = self._draft(execution)
        self._take_values(draft)
        arguments = self._arguments(draft)
        result, arrays = draft.result, draft.arrays
        if any(array.shape[:1] != result.shape[:1] for array in arrays) or not result.ndim:
            raise Unsuited("one of its inputs has other samples than its output")
        inputs = self._inputs(draft)
        if draft.kind == "split":
            self._split(execution, inputs[0], arguments)
        elif not draft.is_elementwise:
            self._made(execution, draft.kind, inputs, draft.output, arguments, result)
        elif not self._join(draft, inputs[0]):
            node = self._made(execution, "batch_norm", inputs, draft.output, arguments, result)
            self._scaled.add(node.name)

    def _draft(self, execution: Execution) -> _Draft:
        """Return what kind of node an execution is, and the values through which paths go on."""
        rule, output = execution.rule, execution.output
        if rule is None or output is None:
            raise Unsuited(f"there is no rule for {execution.type}")
        kind, operands = rule.kind, execution.ports(rule.operands)
        weights = [] if rule.weight is None else execution.ports([rule.weight])
        if any(map(self._depends, weights)):
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
        return _Draft(execution, rule, kind, operands, weights, output)

    def _take_values(self, draft: _Draft) -> None:
        """Set the arrays of a draft; in all of them the first axis is that of samples."""
        draft.result = self._array(draft.output)
        arrays = draft.arrays = [self._array(port) for port in draft.operands]
        if draft.kind == "product" and len(draft.weights) == 1 and arrays[-1] is None:
            arrays[-1] = draft.execution.weight
        if draft.result is None or any(array is None for array in arrays) or not arrays:
            raise Unsuited("its values are not floating-point numbers")
        if draft.kind == "add" and len(arrays) == 1:
            draft.kind = "shift"
        changes = draft.rule.is_view and arrays[0].shape[:1] != draft.result.shape[:1]
        if changes or not self._merged.keys().isdisjoint(draft.operands):
            self._merge(draft)

    def _arguments(self, draft: _Draft) -> dict[str, Any]:
        """Return what the rule of a draft's kind needs in addition to the values."""
        arrays, arguments = draft.arrays, dict[str, Any]()
        if draft.is_elementwise:
            if arrays[0].shape != draft.result.shape:
                raise Unsuited("its output has another shape than its input")
        elif draft.kind == "product":
            if any(array.ndim < 2 for array in arrays):
                raise Unsuited("one of its factors is a vector")
        elif draft.kind != "gate" and not draft.rule.is_view:
            if not all(array.ndim for array in arrays):
                raise Unsuited("one of its inputs has no axis of samples")
            arguments = draft.rule.arguments(draft.execution.given, arrays, draft.result)
            if draft.rule.weight is not None:
                arguments |= _weight_of(draft.execution, len(arguments["layout"]))
        if draft.kind == "concat":
            parts = self._parts(draft.execution, draft.operands, arguments["axis"])
            arguments["parts"] = parts
        return arguments

    def _inputs(self, draft: _Draft) -> tuple[int, ...]:
        """Return the numbers of a draft's operands, whose values are kept."""
        import numpy as np

        numbers = tuple(self._number(port) for port in draft.operands)
        for number, array in zip(numbers, draft.arrays, strict=True):
            self.values[number] = np.asarray(array, float)
        return numbers

    def _join(self, draft: _Draft, taken: int) -> bool:
        """Make a shift or scale part of the layer before it; return False if it is none."""
        import numpy as np

        before = self._makers.get(taken)
        if before is None or self._takers[draft.operands[0]] != 1:
            return False
        if not self._joins(before, draft.kind):
            return False
        self._numbers[draft.output] = taken
        self.values[taken] = np.asarray(draft.result, float)
        return True

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

    def _merge(self, draft: _Draft) -> None:
        """Set the result of values whose first axis merges samples, or that merges them itself."""
        arrays, result = draft.arrays, draft.result
        if not all(array.ndim for array in arrays):
            raise Unsuited("one of its inputs is a scalar, which has no samples")
        (samples, *others) = {len(array) for array in arrays}
        is_view = draft.rule.is_view
        passes = is_view or draft.kind in ("linear", "shift", "scale", "add", "gate", "reshape")
        fits = result.ndim and samples and len(result) % samples == 0
        if others or not passes or not fits or (is_view and result.size != arrays[0].size):
            raise Unsuited("it changes the axis of samples, or works on one that was merged")
        if len(result) != samples:
            self._merged[draft.output] = samples
            draft.result = self._array(draft.output)

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

    def _depends(self, port: Port) -> bool:
        """Return True if a value depends on a layer, or on a node of the network."""
        return port in self._behind or self._numbers.get(port) in self._makers

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


def _weight_of(execution: Execution, rank: int) -> dict[str, Any]:
    """Return the arguments of a layer with a weight of this rank."""
    import numpy as np

    weight = execution.weight
    if not isinstance(weight, np.ndarray) or weight.ndim != rank:
        raise Unsuited("its weight is not a matrix")
    array = weight if weight.dtype.kind == "f" else weight.astype(float)
    return {"weight": array, "weight_key": execution.weight_key}


def _size(array: Any) -> int:
    return -1 if array is None else int(array.size)


def elements(values: Mapping[int, Any], number: int) -> int:
    """Return the number of elements of a value in one sample."""
    return int(values[number][0].size) if len(values[number]) else 0
