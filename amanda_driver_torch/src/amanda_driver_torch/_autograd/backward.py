"""Raw backward ops: the nodes that forward ops made, and the accumulation into leaves.

Owns the hooks on nodes, and the record of each node. Hooks hold their record weakly and hold no
tensor, since a context with tensors that a C++ node refers to would leak for ever.

A hook is set when the forward op runs. When its node first runs, it finds its context. It passes
gradients through the plan, and is removed with the last tool that planned something there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import torch

from amanda_core import OpContext, Plan, Session, Site, Step, Tool
from amanda_core.weak import Ref
from amanda_driver_torch._autograd.gradient_hooks import unchanged_after
from amanda_driver_torch._autograd.lifetime import Lifetime, Token
from amanda_driver_torch._autograd.nodes import name_of, new_nodes, new_nodes_behind
from amanda_driver_torch._autograd.records import NodeRecord
from amanda_driver_torch._identity.leaves import Leaves
from amanda_driver_torch._torch.extension import native
from amanda_driver_torch._torch.internals import current_node

__all__ = ["Backward", "unchanged"]

# Key in the metadata of a leaf's node; the value tells which attachment has hooked the node.
_MARK = "amanda"

# Prefix of the modules of all hooks that the driver registers.
_OWN = f"{__name__.partition('.')[0]}._"


class Backward:
    """The backward program of one attachment.

    Args:
        session: The session.
        leaves: Names the leaves whose gradients are accumulated.
        namespace: Namespace of the contexts.
    """

    def __init__(self, session: Session, leaves: Leaves, namespace: str) -> None:
        self.session = session
        self.lifetime = Lifetime(session)
        self._names = leaves
        self._namespace = namespace
        self._leaves: dict[Hashable, tuple[Ref, NodeRecord]] = {}
        #: Execution -> its plan of gradients. Hooks hold the token, but neither the plan nor its
        #: tool, which may hold outputs that lead back to the hooked node.
        self._plans: weakref.WeakKeyDictionary[Token, Plan] = weakref.WeakKeyDictionary()
        #: Hooked node -> its record, which the op's record may have dropped.
        self._records: weakref.WeakKeyDictionary[Token, NodeRecord] = weakref.WeakKeyDictionary()
        #: Forward op whose nodes are hooked later -> the records of these nodes, and its context;
        #: see `pending_hooks`.
        self.pending: weakref.WeakKeyDictionary[Token, tuple[dict[Any, NodeRecord], OpContext]] = (
            weakref.WeakKeyDictionary()
        )
        #: Epoch -> the tools that were applied in it, if they still exist.
        self._tools: dict[int, tuple[weakref.ref[Tool], ...]] = {}
        #: Handles of the hooks on leaves, with functions that remove our mark from the node's
        #: metadata. They hold neither the node nor its metadata, which may hold users' objects.
        self._hooks: list[tuple[Any, weakref.ref[Callable[[], object]]]] = []
        self._hooks_limit = 64
        #: Empty once the session has ended; hooks that C has registered on leaves hold it.
        self.life = [True]
        #: Whether a backward pass was itself differentiated so far.
        self.second_order = False
        #: Node that ran -> records of the nodes that it made (gradients of gradients).
        self._second_order: weakref.WeakKeyDictionary[NodeRecord, dict[Any, NodeRecord]] = (
            weakref.WeakKeyDictionary()
        )

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

    def track(
        self,
        records: dict[Any, NodeRecord],
        forward: OpContext,
        tensors: Sequence[torch.Tensor],
        start: int,
        prefix: str = "",
        tapped: bool = False,
    ) -> bool:
        """Register hooks on the nodes that lead to `tensors` and were made since `start`.

        Args:
            records: Records of the forward op's nodes so far; new ones are added.
            forward: Context of the forward op.
            tensors: Its outputs, and arguments that it wrote.
            start: Sequence number before it ran.
            prefix: Distinguishes orders of differentiation (gradients of gradients).
            tapped: Whether these nodes have hooks for gradients of inputs already, which must run
                after those of the nodes themselves.

        Returns:
            Whether these nodes need no hooks in this epoch.
        """
        nodes, leaves = new_nodes(tensors, start)
        settled = True
        for node, key in _keyed(nodes, prefix):
            record = self._record(records, forward, key)
            if not record.idle(self.session):
                settled = False
                hooks = self._hook(node, record)
                if tapped:
                    _put_in_place(hooks[1:], 0, own=True)
        for leaf in leaves:
            settled &= self._track_leaf(leaf)
        return settled

    def hook_pending(
        self, token: Token, start: int, number: int, node: Any
    ) -> Callable[[Sequence[Any]], Any]:
        """Register hooks on the nodes of an execution that had a single hook so far.

        Args:
            token: The key of its op in `pending`.
            start: Sequence number before the op ran.
            number: Number of that hook.
            node: The node that has it; None for the node that is running.

        Returns:
            The function that replaces that hook from now on.
        """
        records, forward = self.pending[token]
        first: Any = current_node() if node is None else node
        own: Callable[[Sequence[Any]], Any] = unchanged
        nodes, leaves = new_nodes_behind([first], start)
        for one, key in _keyed(nodes, ""):
            record = self._record(records, forward, key)
            if record.idle(self.session):
                continue
            of_node = Token(token.epoch)
            if one is first:
                own = self._hook_first(one, record, of_node, number)
            else:
                before, after = self._hook(one, record, of_node)
                _put_in_place([before], number)
                _put_in_place([after], number, own=True)
        for leaf in leaves:
            self._track_leaf(leaf, token.epoch, number)
        return own

    def _hook_first(
        self, node: Any, record: NodeRecord, token: Token, number: int
    ) -> Callable[[Sequence[Any]], Any]:
        """Register hooks on a node that has a prehook; return the new function of that prehook."""
        gone = False

        def finished() -> None:
            nonlocal gone
            gone = True
            handle.remove()

        before, after = self.hooks(record, token, finished)
        handle = node.register_hook(after)
        _put_in_place([handle], number, own=True)
        return lambda grads: None if gone else before(grads)

    def planned_leaves(
        self, nodes: Sequence[Any]
    ) -> list[tuple[Any, NodeRecord | None, Ref | None]]:
        """Return those of some leaves' nodes that need hooks, with their records and leaves.

        Args:
            nodes: The nodes that accumulate the leaves' gradients.

        Returns:
            None for the record and the leaf if it has not been analysed yet.
        """
        found: list[tuple[Any, NodeRecord | None, Ref | None]] = []
        for node in nodes:
            leaf, record = self._leaves.get(self._names.key(node.variable)[0], (None, None))
            known = leaf is not None and leaf() is node.variable
            if not known or record is None or not record.analysed(self.session):
                found.append((node, None, None))
            elif not record.idle(self.session):
                found.append((node, record, leaf))
        return found

    def leaf_hook(self) -> Callable[[Any], None]:
        """Return a function that hooks the node of a leaf that may not have been analysed yet."""
        held = weakref.ref(self)

        def hook(node: Any) -> None:
            backward = held()
            if backward is not None:
                backward._track_leaf(node)

        return hook

    def planned_hook(
        self, make: Callable[[object], list[tuple[bool, Any]]]
    ) -> Callable[[Any], None]:
        """Return a function that hooks a leaf's node by hooks that need no analysis in this epoch.

        Args:
            make: Returns the hooks of one node, which hold its argument, and whether each comes
                before the node.
        """
        token = Token(self.epoch())

        def register(node: Any, unmark: Callable[[], None]) -> list[Any]:
            return [
                node.register_prehook(hook) if is_before else node.register_hook(hook)
                for is_before, hook in make(unmark)
            ]

        return lambda node: self._hook_leaf(node, token, register, planned=True)

    def _hook_leaf(
        self,
        node: Any,
        token: Token,
        register: Callable[[Any, Callable[[], None]], list[Any]],
        planned: bool,
    ) -> None:
        """Register hooks on a leaf's node, unless it has some.

        The node dies with the graph, so the next iteration hooks a new node. It may also stay
        (shared by the ops of one iteration, or referenced by the user), and is hooked only once.

        Args:
            node: The node.
            token: Has the epoch in which it was used.
            register: Registers hooks, which hold the function that removes our mark from the node.
            planned: Whether they are valid in this epoch only.
        """
        if native is not None:
            if native.leaf_epoch(node, self.life) == token.epoch:
                return
            native.retire_leaf(node, self.life)
        metadata = node.metadata
        lifetime, old, handles = metadata.get(_MARK, (None, None, None))
        if lifetime is self.lifetime and (handles is None or old.epoch == token.epoch):
            # A node of an older graph, perhaps made under other tools, is used in a new graph.
            old.epoch = token.epoch
            return
        if lifetime is self.lifetime:
            for handle in handles:
                handle.remove()

        def unmark() -> None:
            metadata.pop(_MARK, None)

        hooks = register(node, unmark)
        metadata[_MARK] = (self.lifetime, token, hooks if planned else None)
        held: weakref.ref[Callable[[], object]] = weakref.ref(unmark)
        self._hooks += [(hook, held) for hook in hooks]
        if len(self._hooks) > self._hooks_limit:
            self._hooks = [one for one in self._hooks if one[0].hooks_dict_ref() is not None]
            self._hooks_limit = 2 * len(self._hooks) + 64

    def record_of(
        self, records: dict[Any, NodeRecord], nodes: Sequence[Any]
    ) -> list[tuple[Any, NodeRecord | None]]:
        """Return the nodes of one execution with their records, in order of creation."""
        return [(node, records.get(key)) for node, key in _keyed(nodes, "")]

    def track_second_order(
        self, record: NodeRecord, tensors: Sequence[torch.Tensor], start: int
    ) -> None:
        """Register hooks on the nodes that a node made while it ran (``create_graph=True``)."""
        if record.forward is not None:
            again = self._second_order.setdefault(record, {})
            self.track(again, record.forward, tensors, start, prefix=f"{record.site.key!r}")

    def _record(
        self, records: dict[Any, NodeRecord], forward: OpContext, key: tuple[str, str, int]
    ) -> NodeRecord:
        """Return the record of a forward op's node, creating it if there is none."""
        record = records.get(key)
        if record is None:
            record = records[key] = NodeRecord(self, self._site(forward, key, key[1]), forward)
        return record

    def _site(self, forward: OpContext, key: Any, name: str) -> Site:
        return Site(
            key=("backward", *key),
            op_type=name,
            namespace=self._namespace,
            name=f"{forward.name}:{name}",
            module_path=forward.module_path,
            source=forward.source,
            zone=forward.zone,
        )

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
        held, lifetime = weakref.ref(self), self.lifetime
        token = token or Token(self.epoch())
        self._records[token] = record

        def before(grads: Sequence[Any], done: tuple[Any, ...] = ()) -> tuple[Any, ...] | None:
            backward = held()
            if not lifetime.active() or backward is None:
                return None
            backward.warn_if_left(token.epoch)
            try:
                return backward._records[token].before(grads, done)
            except Exception as error:
                unchanged_after(error)
                return None

        def after(
            grad_inputs: Sequence[Any], grads: Sequence[Any], done: tuple[Any, ...] = ()
        ) -> tuple[Any, ...] | None:
            backward = held()
            if not lifetime.active() or backward is None:
                return None
            own = backward._records[token]
            try:
                changed = own.after(grad_inputs, grads, done)
            except Exception as error:
                unchanged_after(error)
                return None
            if own.idle(backward.session):
                finished()
            return changed

        return before, after

    def _track_leaf(self, node: Any, epoch: int = 0, number: int | None = None) -> bool:
        """Register hooks on the accumulation into a leaf, unless it has some or needs none.

        Args:
            node: The node.
            epoch: Epoch in which it was used; 0 for now.
            number: Number of the hook that these hooks replace in the order, if they are set later.

        Returns:
            Whether it needs no hook in this epoch.
        """
        leaf = node.variable
        key_of = self._names.key if number is None else self._names.remembered_key
        key, name = key_of(leaf)
        held = self._leaves.get(key)
        record = held[1] if held is not None else None
        if held is not None and isinstance(leaf, torch.nn.Parameter) and held[0]() is not leaf:
            # A new parameter of the same name must not inherit the context of the dead one.
            if held[1].context is not None:
                self.session.forget(held[1].context)
            record = None
        if record is None:
            site = Site(
                key=("accumulate", key),
                op_type="AccumulateGrad",
                namespace=self._namespace,
                name=f"{name}:AccumulateGrad",
                module_path=name.rpartition(".")[0],
            )
            record = NodeRecord(self, site, None)
            self._leaves[key] = (Ref(leaf), record)
        if record.idle(self.session):
            return True
        token = Token(epoch or self.epoch())

        def register(node: Any, unmark: Callable[[], None]) -> list[Any]:
            hooks = self._hook(node, record, token, unmark)
            if number is not None:
                _put_in_place(hooks, number)
            return hooks

        self._hook_leaf(node, token, register, planned=False)
        return False

    def release(self) -> None:
        """Remove all hooks from the leaves, whose nodes may live on."""
        for hook, held in self._hooks:
            unmark = held()
            hook.remove()
            if unmark is not None:
                unmark()
        self.life.clear()
        self.life = [True]
        self._hooks.clear()
        self._leaves.clear()
        self._plans.clear()
        self._records.clear()
        self.pending.clear()


def unchanged(_: Sequence[Any]) -> None:
    """Leave the gradients unchanged: the hook before a node that needs none."""


def _put_in_place(handles: Sequence[Any], number: int, own: bool = False) -> None:
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


def _keyed(nodes: Sequence[Any], prefix: str) -> Iterator[tuple[Any, tuple[str, str, int]]]:
    """Return each node with a key that identifies it among those of its op."""
    same: Counter[str] = Counter()
    for node in nodes:
        name = name_of(node)
        # Counted per type in order of creation, since sequence numbers may have gaps.
        same[name] += 1
        yield node, (prefix, name, same[name])
