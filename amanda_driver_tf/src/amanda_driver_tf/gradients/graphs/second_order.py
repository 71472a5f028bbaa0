"""Refuses second derivatives of gradients that new nodes compute.

If an edit is differentiated as written, or an op or its backward is replaced, new nodes compute the
gradient instead of TensorFlow's ops. A second differentiation was built for TensorFlow's ops, so it
would return the wrong derivative.
"""

from __future__ import annotations

from collections.abc import Sequence

from amanda_core.driver_kit import Step
from amanda_core.interface import UnsupportedError
from amanda_driver_tf.graphs.body import Body
from amanda_driver_tf.graphs.records import Record, Records, components
from amanda_driver_tf.insertion.op_values import key_of, upstream_of

__all__ = ["refuse_second"]


def refuse_second(recomputed: Sequence[tuple[Record, Step]], body: Body) -> None:
    """Refuse a body that differentiates gradients which new nodes compute.

    Args:
        recomputed: These gradients with the steps that cause it, of that body or of its forward
            body.
        body: The body.

    Raises:
        UnsupportedError: It differentiates one of them.
    """
    records = Records.of(body.graph)
    if records is None:
        return
    for run in records.runs:
        others = [each for each in recomputed if each[0].run is not run]
        # A run of a session may compute only some of the gradients in its graph.
        parts = [part for result in run.results for part in components(result)]
        if not others or not any(body.value_of(part) for part in parts):
            continue
        targets = upstream_of(run.targets)
        for owner, step in others:
            if any(key_of(part) in targets for each in owner.in_grads for part in components(each)):
                raise UnsupportedError(
                    f"The gradient of {owner.forward.name!r} is computed by new ops, since the op "
                    "was edited, and is differentiated once more",
                    where=step.where,
                    fix="Edit straight through, or compute the second derivatives eagerly",
                )
