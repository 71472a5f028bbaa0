"""Raw backward ops: the nodes that forward ops made, and the accumulation into leaves.

Owns which nodes have hooks, and the record of each node. A hook is set when the forward op runs.
When its node first runs, it finds its context. It passes gradients through the plan, and is removed
with the last tool that planned something there.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any

import torch

from amanda_core.driver_kit import OpContext, Ref, Scope, Session
from amanda_core.interface import Site
from amanda_driver_torch.gradients.node_hooks import (
    NodeHooks,
    Token,
    put_in_place,
    unchanged,
)
from amanda_driver_torch.gradients.nodes import name_of, new_nodes, new_nodes_behind
from amanda_driver_torch.gradients.records import FlatRecord, NodeRecord, PartRecord
from amanda_driver_torch.identity.leaves import Leaves
from amanda_driver_torch.threads.state import STATE
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import current_node

__all__ = ["Backward", "keyed", "site_of"]

# Key in the metadata of a leaf's node; the value tells which attachment has hooked the node.
_MARK = "amanda"
_NO_NAMES: Mapping[str, str] = {}


class Backward(NodeHooks):
    """The backward program of one attachment.

    Args:
        session: The session.
        leaves: Names the leaves whose gradients are accumulated.
        namespace: Namespace of the contexts.

    Attributes:
        watch: The native extension's part of the interceptor, or None.
        unseen: What observers did not see -> the reason.
    """

    watch: Any = None

    def __init__(self, session: Session, leaves: Leaves, namespace: str) -> None:
        super().__init__(session)
        self.unseen: dict[str, str] = session.persistent("pytorch.unseen", dict)
        self._names = leaves
        self._namespace = namespace
        self._leaves: dict[Hashable, tuple[Ref, NodeRecord]] = {}
        #: The keys of their sites.
        self._leaf_sites: set[Hashable] = set()
        #: Forward op whose nodes are hooked later -> the records of these nodes, and its context;
        #: see `pending_hooks`.
        self.pending: weakref.WeakKeyDictionary[Token, tuple[dict[Any, NodeRecord], OpContext]] = (
            weakref.WeakKeyDictionary()
        )
        #: Handles of the hooks on leaves, with functions that remove our mark from the node's
        #: metadata. They hold neither the node nor its metadata, which may hold users' objects.
        self._hooks: list[tuple[Any, weakref.ref[Callable[[], object]]]] = []
        self._hooks_limit = 64
        #: Key of a leaf -> the session's part that has hooked it last, of all threads.
        self._hooked_by: dict[Hashable, weakref.ref[Backward]] = session.shared(
            "pytorch.hooked leaves", dict
        )
        #: Empty once the session has ended; hooks that C has registered on leaves hold it.
        self.life = [True]
        #: Whether a backward pass was itself differentiated so far.
        self.second_order = False
        #: Node that ran -> records of the nodes that it made (gradients of gradients).
        self._second_order: weakref.WeakKeyDictionary[NodeRecord, dict[Any, NodeRecord]] = (
            weakref.WeakKeyDictionary()
        )

    def resume(self, session: Session) -> None:
        """Serve another session, after `release`. Hooks of earlier graphs do nothing."""
        self.serve(session)
        self.second_order = False
        self._second_order.clear()

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
        for node, key in keyed(nodes, prefix):
            record = self._record(records, forward, key)
            if not record.idle(self.session):
                settled = False
                hooks = self._hook(node, record)
                if tapped:
                    put_in_place(hooks[1:], 0, own=True)
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
        for one, key in keyed(nodes):
            record = self._record(records, forward, key)
            if record.idle(self.session):
                continue
            of_node = Token(token.epoch)
            if one is first:
                own = self._hook_first(one, record, of_node, number)
            else:
                before, after = self._hook(one, record, of_node)
                put_in_place([before], number)
                put_in_place([after], number, own=True)
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
        put_in_place([handle], number, own=True)
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
        # Sessions of several threads may hook it.
        mark = _MARK, id(self.lifetime)
        lifetime, old, handles = metadata.get(mark, (None, None, None))
        if lifetime is self.lifetime and (handles is None or old.epoch == token.epoch):
            # A node of an older graph, perhaps made under other tools, is used in a new graph.
            old.epoch = token.epoch
            return
        if lifetime is self.lifetime:
            for handle in handles:
                handle.remove()

        def unmark() -> None:
            metadata.pop(mark, None)

        hooks = register(node, unmark)
        metadata[mark] = (self.lifetime, token, hooks if planned else None)
        held: weakref.ref[Callable[[], object]] = weakref.ref(unmark)
        self._hooks += [(hook, held) for hook in hooks]
        if len(self._hooks) > self._hooks_limit:
            self._hooks = [one for one in self._hooks if one[0].hooks_dict_ref() is not None]
            self._hooks_limit = 2 * len(self._hooks) + 64

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
            site = site_of(forward, key)
            record = records[key] = NodeRecord(self, site, forward)
        return record

    def _track_leaf(
        self, node: Any, epoch: int = 0, number: int | None = None, *, remembered: bool = False
    ) -> bool:
        """Register hooks on the accumulation into a leaf, unless it has some or needs none.

        Args:
            node: The node.
            epoch: Epoch in which it was used; 0 for now.
            number: Number of the hook that these hooks replace in the order, if they are set later.
            remembered: Whether the modules that used the leaf do not run any more.

        Returns:
            Whether it needs no hook in this epoch.
        """
        leaf = node.variable
        is_used = number is None and not remembered
        key_of = self._names.key if is_used else self._names.remembered_key
        key, name = key_of(leaf)
        held = self._leaves.get(key)
        record = held[1] if held is not None else None
        if held is not None and isinstance(leaf, torch.nn.Parameter) and held[0]() is not leaf:
            # A new parameter of the same name must not inherit the context of the dead one.
            for one in held[1], *(part for part, _, _ in getattr(held[1], "parts", ())):
                if one.context is not None:
                    self.session.forget(one.context)
            record = None
        if record is None:
            record = self._leaf_record(leaf, key, name)
            self._leaves[key] = (Ref(leaf), record)
            self._leaf_sites.add(record.site.key)
        if record.idle(self.session):
            return True
        token = Token(epoch or self.epoch())
        self._hooked_by[record.site.key] = weakref.ref(self)

        def register(node: Any, unmark: Callable[[], None]) -> list[Any]:
            hooks = self._hook(node, record, token, unmark)
            if number is not None:
                put_in_place(hooks, number)
            return hooks

        self._hook_leaf(node, token, register, planned=False)
        return False

    def name_leaf(self, leaf: torch.Tensor, scope: Scope) -> None:
        """Remember how a leaf is named that a compiled program uses in a scope."""
        self._names.key(leaf, scope)

    def track_leaves(self, leaves: Sequence[Any]) -> bool:
        """Register hooks on the accumulation into leaves that a compiled program has used.

        Returns:
            Whether they are parameters, and need no hooks in this epoch.
        """
        settled = [self._track_leaf(leaf, remembered=True) for leaf in leaves]
        are_parameters = (isinstance(leaf.variable, torch.nn.Parameter) for leaf in leaves)
        return bool(settled) and all(settled) and all(are_parameters)

    def _leaf_record(self, leaf: torch.Tensor, key: Hashable, name: str) -> NodeRecord:
        site = self._leaf_site(key, name)
        if not (parts := self._names.parts(leaf)):
            return NodeRecord(self, site, None)
        record = FlatRecord(self, site, None)
        record.parts = [
            (PartRecord(self, self._leaf_site(of, part), None), start, shape)
            for of, part, start, shape in parts
        ]
        return record

    def _leaf_site(self, key: Hashable, name: str) -> Site:
        return Site(
            key=("accumulate", key),
            op_type="AccumulateGrad",
            namespace=self._namespace,
            name=f"{name}:AccumulateGrad",
            module_path=name.rpartition(".")[0],
        )

    def has_hooked(self, key: Hashable) -> bool:
        """Return True if this session has hooked the leaf of a site with this key."""
        return key in self._leaf_sites

    def record_of(self, token: Token) -> NodeRecord | None:
        """Return the record of a node; None if its hooks must not run in the calling thread.

        Sessions of several threads may have hooked one leaf, whose gradient is accumulated once.
        """
        record, here = self._records.get(token), STATE.attachment
        if record is None or record.forward is not None or self.session.turn is None:
            return record
        if here is None or here.session is self.session or here.session.turn is None:
            return record
        key = record.site.key
        if here.backward.has_hooked(key):
            return None
        last = self._hooked_by.get(key, lambda: None)()
        return record if last is None or last is self or last.session.closed else None

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
        self._leaf_sites.clear()
        self._plans.clear()
        self._records.clear()
        self.pending.clear()


def keyed(
    nodes: Sequence[Any], prefix: str = "", names: Mapping[str, str] = _NO_NAMES
) -> Iterator[tuple[Any, tuple[str, str, int]]]:
    """Return each node with a key that identifies it among those of its op.

    Args:
        nodes: The nodes.
        prefix: Distinguishes orders of differentiation.
        names: Other names of nodes -> their names in eager mode.
    """
    same: Counter[str] = Counter()
    for node in nodes:
        name = name_of(node)
        name = names.get(name, name)
        # Counted per type in order of creation, since sequence numbers may have gaps.
        same[name] += 1
        yield node, (prefix, name, same[name])


def site_of(forward: OpContext, key: tuple[str, str, int]) -> Site:
    """Return the facts of a backward op.

    Args:
        forward: Context of the forward op.
        key: Identifies it among the nodes of this op, as in `keyed`.
    """
    return Site(
        key=("backward", *key),
        op_type=key[1],
        namespace=forward.namespace,
        name=f"{forward.name}:{key[1]}",
        module_path=forward.module_path,
        source=forward.source,
        zone=forward.zone,
        same_as=forward.site.same_as,
    )
