"""The backward program of an op.

A node is the whole backward of its op: it receives the op's whole gradient and returns the op's
contributions. So the aligned view, planned on the forward context, directly surrounds the raw one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tinytape
from amanda_core.driver_kit import BackwardProgram, OpContext, Session, several
from tinytape import Node

__all__ = ["watch"]


def watch(session: Session, forward: OpContext, node: Node) -> None:
    """Put tools around the node of an op."""
    vanilla = node.pull

    def pull(gradient: Any) -> Sequence[Any]:
        program = BackwardProgram(session, forward, node.name, node)
        if not program.is_active:
            return vanilla(gradient)
        with tinytape.no_grad():
            arriving = program.enter([gradient])
            if program.replacement is None:
                return program.leave(vanilla(*arriving))
            found = several(program.replacement.replace(arriving))
            return program.leave(found + [None] * (len(node.sources) - len(found)))

    node.pull = pull
