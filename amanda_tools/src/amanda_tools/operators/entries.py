"""What every tool's result says of an operator: which one it is, and where it stands.

Owns these facts, what tells one operator from another, paths of modules, and which operators only
rearrange values.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from amanda_core import OpContext
from amanda_core.results import OpFigures

if TYPE_CHECKING:
    from typing_extensions import Self

__all__ = [
    "REARRANGING",
    "EitherWayOp",
    "OpFacts",
    "key_of",
    "with_parents",
]

#: Common words of operators whose results hold elements of their inputs and nothing else.
REARRANGING = frozenset(
    [
        *("reshape", "transpose", "squeeze", "unsqueeze", "expand", "tile", "repeat", "identity"),
        *("slice", "split", "concat", "stack", "flip", "roll", "tril", "triu"),
        *("channel_shuffle", "depth_to_space", "space_to_depth"),
    ]
)


@dataclass
class OpFacts:
    """One operator.

    Attributes:
        id: Op id, the same in each run of the same program.
        type: The backend's name of the operator.
        word: The common word for it, or None.
        name: Readable name.
        module: Path of the module that it ran in.
        source: ``file:line`` of the call, or None.
        namespace: ``framework/version/mode``.
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
        """The facts of a context's op.

        Args:
            context: Context of the op.
            **more: Attributes of the subclass.
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
        """Return what a result says of this operator, for the results of other tools."""
        return OpFigures(self.namespace, self.id, self.name, False, values)


@dataclass
class EitherWayOp(OpFacts):
    """One operator, or one backward operator.

    Attributes:
        phase: ``forward`` or ``backward``.
        forward: Of a backward operator: name of its forward operator, or None.
        forward_type: Of a backward operator: the backend's name of its forward operator, or None.
        zone: ``model``, or another part of a program, such as ``optimizer``.
    """

    phase: str = "forward"
    forward: str | None = None
    forward_type: str | None = None
    zone: str = "model"

    @classmethod
    def of(cls, context: OpContext, **more: Any) -> Self:
        """The facts of a context's op; of a backward context those of the backward op.

        Module and source line are those of the forward op where it has none of its own, and the
        common word is the forward op's.
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
        """Return what a result says of this operator, for the results of other tools."""
        return super().figures(values)._replace(is_backward=self.phase == "backward")

    @property
    def kind(self) -> str:
        """Common word, or the backend's name where there is none; of the forward operator."""
        return self.word or self.forward_type or self.type


def key_of(context: OpContext) -> tuple[object, ...]:
    """Return what tells an op from the others.

    One tool may see several programs, whose ids are not each other's.
    """
    return (
        context.namespace,
        context.get_op_id(),
        context.get_backward_op_id(),
        context.op_type,
        context.name,
        context.source,
    )


def with_parents(path: str) -> list[str]:
    """A module path and those of the modules around it, from the outside; ``""`` is the first.

    >>> with_parents("encoder.0")
    ['', 'encoder', 'encoder.0']
    """
    # Frameworks separate by a point or a stroke.
    ends = [index for index, letter in enumerate(path) if letter in "./"]
    return ["", *(path[:end] for end in ends), *([path] if path else [])]
