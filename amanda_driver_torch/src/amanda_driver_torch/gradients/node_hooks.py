"""Hooks on a node of the autograd graph, and what they find when they run: a session, a plan.

Hooks hold the session's part weakly, and their record and their plan by a token only: a context
with tensors that a C++ node refers to would leak for ever.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from amanda_core.driver_kit import Plan, Session, Step, Tool, warn
from amanda_driver_torch.gradients.gradient_hooks import unchanged_after
from amanda_driver_torch.gradients.records import NodeRecord

__all__ = ["Lifetime", "NodeHooks", "Token", "put_in_place", "unchanged"]

# Prefixes of the modules of all hooks that the driver registers.
_DRIVER = __name__.partition(".")[0]
_OWN = tuple(f"{_DRIVER}.{part}" for part in ("gradients.", "execution.", "_native"))


class Lifetime:
    """Tells whether a session still exists, and outlives it.

    Args:
        session: The session.
        warns: Whether a hook that runs after `apply` warns of it.
    """

    __slots__ = ("_session", "_thread", "_warned")

    def __init__(self, session: Session, *, warns: bool = True) -> None:
        self._session = weakref.ref(session)
        # A thread can do nothing about tools that another one has applied.
        self._warned = not warns or session.host is not None
        #: The thread that has, if several share the tools.
        self._thread = None if session.turn is None else threading.get_ident()

    def active(self) -> bool:
        """Return True if routines may run now; warn once if `apply` has ended."""
        session = self._session()
        if session is None or session.closed:
            self.warn()
            return False
        return session.enabled

    def warn(self) -> None:
        """Warn once that routines do not run, since `apply` has ended."""
        if not self._warned and self._thread in (None, threading.get_ident()):
            self._warned = True
            warn(
                "Backward ran after `apply` ended: edits made in the forward pass stay, "
                "backward routines do not run. Call backward inside `apply`."
            )


class Token:
    """Ties an object to the hooks of a graph, so that the object dies with the graph.

    Attributes:
        epoch: Epoch in which the graph was made; the last one if several graphs share the hook.
    """

    __slots__ = ("__weakref__", "epoch")

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch


class NodeHooks:
    """Makes hooks for the nodes of one session's graphs.

    Attributes:
        session: The session.
        lifetime: Tells hooks whether it still exists.
    """

    def __init__(self, session: Session) -> None:
        self.serve(session)
        #: Execution -> its plan of gradients. Hooks hold the token, but neither the plan nor its
        #: tool, which may hold outputs that lead back to the hooked node.
        self._plans: weakref.WeakKeyDictionary[Token, Plan] = weakref.WeakKeyDictionary()
        #: Hooked node -> its record, which the op's record may have dropped.
        self._records: weakref.WeakKeyDictionary[Token, NodeRecord] = weakref.WeakKeyDictionary()
        #: Epoch -> the tools that were applied in it, if they still exist.
        self._tools: dict[int, tuple[weakref.ref[Tool], ...]] = {}

    def serve(self, session: Session) -> None:
        """Make hooks of this session from now on."""
        self.session = session
        self.lifetime = Lifetime(session)
        # Hooks on leaves are removed at the end. An exception such as Ctrl-C may leave one, which
        # stands in graphs that are made without tools.
        self._of_leaves = Lifetime(session, warns=False)

    def keep(self, plan: Plan) -> Token:
        """Keep the plan of an execution until its graph is gone."""
        token = Token(self.session.epoch)
        self._plans[token] = plan
        return token

    def renew(self, token: Token, plan: Plan) -> None:
        """Replace the plan kept under a token, before its graph is used."""
        self._plans[token] = plan

    def plan_of(self, token: Token) -> Plan | None:
        """Return the plan kept under a token; None once `apply` has ended."""
        return self._plans.get(token)

    def still_applied(self, step: Step) -> bool:
        """Return True if the tool of a step is still applied; otherwise warn once."""
        if any(step.action.tool is tool for tool in self.session.tools):
            return True
        self.lifetime.warn()
        return False

    def epoch(self) -> int:
        """Return the current epoch, and remember its tools for `warn_if_left`."""
        epoch = self.session.epoch
        if epoch not in self._tools:
            if len(self._tools) > 64:
                self._tools.clear()
            self._tools[epoch] = tuple(weakref.ref(tool) for tool in self.session.tools)
        return epoch

    def warn_if_left(self, epoch: int) -> None:
        """Warn once if tools of `epoch` that analyse backward ops are no longer applied."""
        if epoch == self.session.epoch:
            return
        for reference in self._tools.get(epoch, ()):
            tool = reference()
            if tool is None or (
                tool.analyses_backward and not any(tool is one for one in self.session.tools)
            ):
                self.lifetime.warn()

    def record_of(self, token: Token) -> NodeRecord | None:
        """Return the record of a node; None if its hooks must not run in the calling thread."""
        return self._records.get(token)

    def _hook(
        self,
        node: Any,
        record: NodeRecord,
        token: Token | None = None,
        done: Callable[[], object] = lambda: None,
    ) -> list[Any]:
        """Register hooks on a node; `done` is called when they are removed as no longer needed."""
        handles: list[Any] = []

        def finished() -> None:
            # A leaf's node lives as long as any graph that contains it.
            for handle in handles:
                handle.remove()
            done()

        before, after = self.hooks(record, token, finished)
        handles += [node.register_prehook(before), node.register_hook(after)]
        return handles

    def hooks(
        self,
        record: NodeRecord,
        token: Token | None = None,
        finished: Callable[[], object] = lambda: None,
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return a prehook and a posthook for a node of `record`, which they hold weakly.

        After the gradients, both accept the results of routines that were called already.

        Args:
            record: The record.
            token: Represents it in the hooks, with the epoch in which the node was made.
            finished: Called by the posthook if further executions need no hooks.
        """
        held = weakref.ref(self)
        lifetime = self.lifetime if record.forward is not None else self._of_leaves
        token = token or Token(self.epoch())
        self._records[token] = record

        def before(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
            backward = held()
            if not lifetime.active() or backward is None:
                return None
            if (own := backward.record_of(token)) is None:
                return None
            if own.forward is not None:  # The node of a leaf is in later graphs as well.
                backward.warn_if_left(token.epoch)
            try:
                return own.before(grads, done)
            except Exception as error:
                unchanged_after(error)
                return None

        def after(
            grad_inputs: Sequence[Any], grads: Sequence[Any], done: tuple[Any, ...] = ()
        ) -> tuple[Any, ...] | None:
            backward = held()
            if not lifetime.active() or backward is None:
                return None
            if (own := backward.record_of(token)) is None:
                return None
            try:
                changed = own.after(grad_inputs, grads, done)
            except Exception as error:
                unchanged_after(error)
                return None
            if own.idle(backward.session):
                finished()
            return changed

        return before, after


def unchanged(_: Sequence[Any]) -> None:
    """Leave the gradients unchanged: the hook before a node that needs none."""


def put_in_place(handles: Sequence[Any], number: int, own: bool = False) -> None:
    """Move hooks of the driver before those that the program registered after hook `number`.

    Args:
        handles: The hooks.
        number: The number.
        own: Whether they are behind the node of an op, where other hooks of the driver are those
            for gradients of inputs, which must run later.
    """
    for handle in handles:
        hooks = handle.hooks_dict_ref()
        for other, hook in list(hooks.items()):
            of_driver = str(getattr(hook, "__module__", "")).startswith(_OWN)
            if other < handle.id and (own if of_driver else number < other):
                # Not `move_to_end`, since PyTorch iterates over it as a plain dict.
                hooks[other] = hooks.pop(other)
