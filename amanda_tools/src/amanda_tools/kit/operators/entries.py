"""Descriptions of operators in the results of tools: which operator it is and where it is called.

Also defines the key that identifies an operator, the parents of a module path, and the operator
types that only rearrange values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda_core import OpContext
from amanda_core.results import OpFigures

if TYPE_CHECKING:
    from typing import Self

__all__ = [
    "REARRANGING",
    "EitherWayOp",
    "OpFacts",
    "key_of",
    "leaf_of",
    "passes_gradients_on",
    "program_key_of",
    "with_parents",
    "words",
]


def words(text: str) -> frozenset[str]:
    """Split a text into a set of words."""
    return frozenset(text.split())


#: Common types of operators whose outputs contain only elements of their inputs.
REARRANGING = words(
    "reshape transpose squeeze unsqueeze expand tile repeat identity slice split concat stack flip "
    "roll tril triu channel_shuffle depth_to_space space_to_depth"
)


@dataclass
class OpFacts:
    """Description of one operator.

    Attributes:
        id: Op id, the same in each run of the same program.
        type: The framework's name of the operator.
        word: The common operator type, or None.
        name: Readable name.
        module: Path of the module in which the operator runs.
        source: ``file:line`` of the call, or None.
        namespace: ``framework/version/mode``.

    >>> op = OpFacts(1, "relu", "relu", "1/relu", "act", None, "pytorch/2/eager")
    >>> op.figures({"calls": 2}).name
    '1/relu'
    """

    id: int
    type: str
    word: str | None
    name: str
    module: str
    source: str | None
    namespace: str

    @classmethod
    def of(cls, context: OpContext, **more: Any) -> Self:
        """Create the description from a context.

        Args:
            context: Context of the operator.
            **more: Further attributes of the subclass.
        """
        word = context["type"]
        return cls(
            id=context.get_op_id(),
            type=context.op_type,
            word=word if isinstance(word, str) else None,
            name=context.name,
            module=context.module_path,
            source=context.source,
            namespace=context.namespace,
            **more,
        )

    def figures(self, values: Mapping[str, int | float | str]) -> OpFigures:
        """Return figures of this operator in the form in which tools share them."""
        return OpFigures(self.namespace, self.id, self.name, False, values)


@dataclass
class EitherWayOp(OpFacts):
    """Description of one operator or one backward operator.

    Attributes:
        phase: ``forward`` or ``backward``.
        forward: For a backward operator, the name of its forward operator, or None.
        forward_type: For a backward operator, the framework's type of its forward operator, or
            None.
        zone: ``model``, or another part of the program, such as ``optimizer``.

    >>> op = EitherWayOp(1, "ReluBackward0", "relu", "1/relu", "", None, "pytorch/2/eager")
    >>> op.phase, op.kind
    ('forward', 'relu')
    """

    phase: str = "forward"
    forward: str | None = None
    forward_type: str | None = None
    zone: str = "model"

    @classmethod
    def of(cls, context: OpContext, **more: Any) -> Self:
        """Create the description from a context, forward or backward.

        A backward operator without a module or source line of its own takes those of its forward
        operator. Its common type is always that of the forward operator.
        """
        facts = super().of(context, zone=context.zone, **more)
        if context.is_backward():
            facts.phase, facts.id = "backward", context.get_backward_op_id() or 0
            forward = context.forward
            if forward is not None:
                facts.forward, facts.forward_type = forward.name, forward.op_type
                facts.module = facts.module or forward.module_path
                facts.source = facts.source or forward.source
        return facts

    def figures(self, values: Mapping[str, int | float | str]) -> OpFigures:
        """Return figures of this operator in the form in which tools share them."""
        return super().figures(values)._replace(is_backward=self.phase == "backward")

    @property
    def kind(self) -> str:
        """Return the common type, or else the framework's type, of the forward op if known."""
        return self.word or self.forward_type or self.type


def key_of(context: OpContext) -> tuple[object, ...]:
    """Return a key that identifies an operator.

    The op id alone is not enough: one tool may see several programs, and their ids overlap.

    An analysis routine keeps something by operator::

        found = self.found.setdefault(key_of(context), Found())
    """
    return (
        context.namespace,
        context.get_op_id(),
        context.get_backward_op_id(),
        context.op_type,
        context.name,
        context.source,
    )


def leaf_of(context: OpContext) -> Any:
    """Return the tensor to whose gradient a backward operator adds, or None.

    Only PyTorch has such operators. Call it during the analysis of the operator.
    """
    node = getattr(context.get_backward_op(), "node", None)
    return getattr(node, "variable", None)


def passes_gradients_on(context: OpContext) -> bool:
    """Return True if a backward operator gives its gradients to others, which are seen as well.

    This is only known of PyTorch. Call it during the analysis of the operator.
    """
    node = getattr(context.get_backward_op(), "node", None)
    return node is not None and leaf_of(context) is None


def program_key_of(context: OpContext) -> tuple[object, ...]:
    """Return a key that identifies an operator also where a graph is built again.

    A framework may build the same graph several times, as for training and for validation. Each
    time its operators have other ids, and the same names.
    """
    if "/eager" in context.namespace:
        return key_of(context)
    # Without a module, two functions may have operators of one name.
    place = context.module_path or context.source
    return context.namespace, context.op_type, context.name, place


def with_parents(path: str) -> list[str]:
    """Return a module path and the paths of its parents, outermost first; ``""`` is the whole
    program.

    >>> with_parents("encoder.0")
    ['', 'encoder', 'encoder.0']
    """
    # PyTorch separates modules by a dot, TensorFlow by a slash.
    ends = [index for index, letter in enumerate(path) if letter in "./"]
    return ["", *(path[:end] for end in ends), *([path] if path else [])]
