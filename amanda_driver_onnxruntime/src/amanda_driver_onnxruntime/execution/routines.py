"""`Fragment` and `Staging`: which routines become nodes of the model, and which run on the host.

Owns the nodes of each step of a plan. A routine that is marked as staged is
called once, on values that record what it computes. Otherwise it is called at each execution.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy

from amanda_core.driver_kit import Plan, Step
from amanda_driver_onnxruntime.graphs import Node
from amanda_driver_onnxruntime.staging import NotStagedError, Recorder, Staged

__all__ = ["Done", "Fragment", "Host", "Outcome", "Staging"]


class Fragment:
    """One step as nodes.

    Attributes:
        nodes: The nodes.
        weights: The constants that they read, by name.
        inputs: Position -> the name of the value there.
        outputs: Position -> the name of its new value, or that value itself if it is constant.
        reads_shape: Whether it is only for values of these shapes.
    """

    def __init__(
        self, recorder: Recorder, inputs: Mapping[int, str], outputs: Mapping[int, Any]
    ) -> None:
        self.nodes, self.weights = recorder.nodes, recorder.weights
        self.inputs, self.outputs = inputs, outputs
        self.reads_shape = recorder.reads_shape
        #: Types of the values -> the session that runs the nodes.
        self.parts: dict[Any, Any] = {}

    @property
    def computed(self) -> list[str]:
        """Names of the new values that the nodes compute."""
        found = [one for one in self.outputs.values() if isinstance(one, str)]
        return [name for name in dict.fromkeys(found) if name not in self.inputs.values()]


@dataclass
class Host:
    """One step that runs on the host.

    Attributes:
        why: Why it has no nodes.
        constants: Position -> the new value, if all that it gets is constant; else None.
    """

    why: str
    constants: Mapping[int, Any] | None = None


#: What is known of a step. An observer has no outcome.
Outcome = Fragment | Host | None
#: A plan, with the outcomes of its steps when they last ran; the replacement's is the last one.
Done = tuple[Plan, list[Outcome]]


class Staging:
    """The routines of the operators of one model, under the same tools.

    Args:
        opset: The version of ONNX's operators in the model.
        prefix: What new names begin with.
    """

    def __init__(self, opset: int, prefix: str) -> None:
        self._opset, self._prefix = opset, prefix
        #: Name of an output -> the nodes that have one, which are in separate branches, numbered.
        self._named: dict[str, dict[Node, int]] = {}
        #: Node and point -> types of values and the fragment of each step.
        self._fragments: dict[tuple[Node, str, int], tuple[Step, Any, Fragment | str]] = {}

    def fragment(
        self,
        node: Node,
        point: str,
        number: int,
        step: Step,
        values: Sequence[Any],
        constants: set[int],
    ) -> Fragment | str:
        """Return a step as nodes, or why it has none.

        Args:
            node: The node.
            point: The point in its execution.
            number: The place of the step there.
            step: The step.
            values: The values that it may get.
            constants: Positions of weights and constants.
        """
        if not step.action.staged:
            return "it is not marked with amanda.staged"
        key = (node, point, number)
        types = [_type_of(value, place in constants) for place, value in enumerate(values)]
        lengths = [getattr(value, "shape", None) for value in values]
        known, kept, found = self._fragments.get(key, (None, None, ""))
        if known is step and kept is not None and kept[0] == types:
            reads_shape = isinstance(found, Fragment) and found.reads_shape
            if not reads_shape or kept[1] == lengths:
                return found
        name = next(filter(None, node.outputs), node.name)
        nodes = self._named.setdefault(name, {})
        other = nodes.setdefault(node, len(nodes))
        prefix = f"{self._prefix}/{name}/{point}{number}/{f'{other}/' if other else ''}"
        found = _staged(step, Recorder(self._opset, prefix), prefix, values, constants)
        self._fragments[key] = step, (types, lengths), found
        return found

    def refuse(self, node: Node, point: str, number: int, why: str) -> None:
        """Run a step of `fragment` on the host from now on: ONNX Runtime rejected its nodes."""
        step, types, _ = self._fragments[node, point, number]
        self._fragments[node, point, number] = step, types, why


def _type_of(value: Any, is_constant: bool) -> Any:
    if isinstance(value, numpy.ndarray):
        return value.dtype, value.ndim, id(value) if is_constant else 0
    return type(value)


def _staged(
    step: Step, recorder: Recorder, prefix: str, values: Sequence[Any], constants: set[int]
) -> Fragment | str:
    given: list[Any] = list(values)
    inputs: dict[int, str] = {}
    wanted = step.action.positions
    for place, value in enumerate(values):
        if not isinstance(value, numpy.ndarray) or (wanted is not None and place not in wanted):
            continue
        name = "" if place in constants else f"{prefix}input{place}"
        given[place] = Staged(recorder, value, name)
        if name:
            inputs[place] = name
    try:
        if step.action.kind.is_replacement:
            result = step.replace(given)
            found = list(result) if isinstance(result, (tuple, list)) else [result]
            changes = list(enumerate(found))
        else:
            changes = step(given)
        outputs = {place: _output(recorder, value) for place, value in changes}
    except NotStagedError as error:
        return str(error)
    except Exception as error:  # It runs on the host then, where it raises what it raises.
        return f"it cannot be called on values that stand for others ({type(error).__name__})"
    return Fragment(recorder, inputs, outputs)


def _output(recorder: Recorder, value: Any) -> Any:
    """Return the name of a new value, or the value itself if it is constant."""
    if isinstance(value, Staged):
        if value.recorder is not recorder:
            raise NotStagedError("it keeps a value of another execution")
        return value.value if value.is_constant else value.name
    if value is None or isinstance(value, (list, tuple)):
        raise NotStagedError("it returns lists")
    return numpy.asarray(value)
