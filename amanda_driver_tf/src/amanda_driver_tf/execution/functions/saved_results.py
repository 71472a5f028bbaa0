"""Results that a forward twin saves for its gradients, and the plans that both must agree on.

Owns what is kept between a call and the gradient of that very call, and the refusal of gradients
that cannot receive it.
"""

from __future__ import annotations

from typing import Any

from amanda_core.interface import UnsupportedError
from amanda_driver_tf.execution.functions.twins import Twin
from amanda_driver_tf.gradients.eager.hosted import is_vectorised
from amanda_driver_tf.graphs.analysis import Analysis, OpPlans
from amanda_driver_tf.graphs.function_graphs import GRAPHS
from amanda_driver_tf.tensorflow_internals.tapes import no_tape
from amanda_driver_tf.threads import FunctionCalls

__all__ = ["ForwardPlans", "SavedPlans", "SavedResults"]


class ForwardPlans(Analysis):
    """Plans of forward ops only, without running analysis routines.

    They tell which versions of values exist.

    Args:
        analysis: The whole analysis.
        aligned: Whether to include the plans at the gradients of the forward ops.
    """

    def __init__(self, analysis: Analysis, aligned: bool) -> None:
        self._whole, self._aligned = analysis, aligned

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        return self._whole.is_backward(op)

    def plans_of(self, op: Any, analyse: bool = False) -> OpPlans | None:
        """Return the plans of a forward op; None for backward ops and what is not an operator.

        Args:
            op: The op.
            analyse: Ignored: analysis routines never run here.
        """
        if self.is_backward(op):
            return None
        plans = self._whole.plans_of(op, analyse=False)
        if plans is None or self._aligned:
            return plans
        return plans.unaligned()


class SavedPlans(Analysis):
    """Plans as they were when a forward function ran.

    Args:
        analysis: The whole analysis.
        plans: The plans of its ops, including backward ops, by label and name.
    """

    def __init__(self, analysis: Analysis, plans: dict[tuple[str, str], OpPlans]) -> None:
        self._whole, self._kept = analysis, plans

    def is_backward(self, op: Any) -> bool:
        """Return True if an op belongs to the backward program."""
        return self._whole.is_backward(op)

    def plans_of(self, op: Any, analyse: bool = False) -> OpPlans | None:
        """Return the plans that an op had when the forward function ran.

        Args:
            op: The op.
            analyse: Ignored: the plans are kept, and analysis routines never run here.

        Returns:
            The plans; None if no tool planned anything at the op then.
        """
        return self._kept.get((self._whole.label(op.graph), op.name))


class SavedResults:
    """Extra results of a call of a forward twin, saved for the gradients of that very call.

    Attributes:
        mode: The mode that made the call.
        function: The original function.
        twin: The twin.
        tensors: The twin's results beyond those of the original.
        earlier: The saved results passed to the call itself, if it was the call of a gradient.
        graph: The function's graph, which might otherwise be gone before its gradient is computed.
    """

    __slots__ = ("earlier", "function", "graph", "mode", "tensors", "twin")

    def __init__(
        self,
        mode: FunctionCalls,
        function: str,
        twin: Twin,
        tensors: list[Any],
        earlier: SavedResults | None,
    ) -> None:
        self.mode, self.function, self.twin, self.tensors = mode, function, twin, tensors
        self.earlier = earlier
        self.graph = GRAPHS.get(function)

    def refuse_missing(self, gradient: str, count: int) -> None:
        """Refuse a gradient function if the forward pass did not save the values that it needs.

        Args:
            gradient: The name of the gradient function.
            count: How many values it needs.

        Raises:
            UnsupportedError: Another number of values was saved.
        """
        if len(self.twin.gradients[GRAPHS[gradient]]) != count:
            raise UnsupportedError(
                f"The gradient function {gradient!r} needs values that its forward pass did not "
                "save",
                fix="Run the forward pass again",
            )

    def is_needed(self) -> bool:
        """Return True if a gradient function in a graph needs the saved results, or routines."""
        # If every routine returned None, the gradient reads the original values.
        demanded = any(self.twin.gradients.values()) and self.twin.has_edited()
        return demanded or (self.twin.is_aligned and is_vectorised())

    def refuse_in_graph(self) -> None:
        """Refuse to build the gradient into a graph, which cannot receive the saved results.

        Raises:
            UnsupportedError: The gradient needs them.
        """
        if not self.is_needed() or (is_vectorised() and no_tape()):
            return
        error = UnsupportedError(
            f"Ops of the function {self.function!r} were edited, and its gradient is computed "
            "while TensorFlow builds a graph (by tape.jacobian or batch_jacobian with pfor, or by "
            "a function that contains tape.gradient but not the tape)",
            fix="Pass experimental_use_pfor=False, or move the tape into the function",
        )
        error.ag_pass_through = True  # type: ignore[attr-defined]  # AutoGraph keeps it as it is.
        raise error
