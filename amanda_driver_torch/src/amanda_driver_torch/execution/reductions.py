"""Gradients of parameters after their reduction over processes, each as a backward op of its own.

Owns which gradients a backward pass has reduced. `DistributedDataParallel` reduces in C++, and FSDP
writes the gradients of its parameters after a collective, so they are looked at when the pass has
ended. Owns the ops of the reductions of buckets, too. Nothing here communicates.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from amanda_core.driver_kit import OpContext, Ref, Scopes, Session, WeakGroup
from amanda_core.interface import Site, UnsupportedError
from amanda_driver_torch.execution.written_values import write_argument
from amanda_driver_torch.facts import FACTS
from amanda_driver_torch.gradients.records import BackwardProgram, NodeRecord, OpRecord
from amanda_driver_torch.groups import WRAPPERS, processes, wrappers
from amanda_driver_torch.placements import distributed
from amanda_driver_torch.threads.modes import analysed, call_without_modes, changes_of
from amanda_driver_torch.threads.state import AFTER_BACKWARD, BEFORE_BACKWARD, STATE, call_quietly
from amanda_driver_torch.torch_internals.distributed import (
    groups_of,
    ranks_of,
    reduces_now,
    reducible,
    sharded_groups,
    shards_in,
)
from amanda_driver_torch.torch_internals.extension import native
from amanda_driver_torch.torch_internals.internals import (
    accumulation_of,
    dispatch_modes,
    functorch_active,
    version_of,
)
from amanda_driver_torch.torch_internals.modules import inner_of, modules_in

__all__ = ["REDUCE_GRAD", "Bucket", "Reductions", "clear_hooks", "expected"]

#: Type of the ops.
REDUCE_GRAD = "ReduceGrad"
#: Where its routines run -> how contexts call the values there.
_POINTS = ((BEFORE_BACKWARD, "grad_outputs"), (AFTER_BACKWARD, "grad_inputs"))
#: `DistributedDataParallel` modules that reduce in the next backward pass that reaches them.
_EXPECTED: WeakGroup[nn.Module] = WeakGroup()


def expected(reducer: Any) -> nn.Module | None:
    """Note that a `DistributedDataParallel` module will reduce its gradients, and return it.

    Args:
        reducer: Its attribute of this name.
    """
    for module in wrappers():
        if vars(module).get("reducer") is reducer:
            _EXPECTED.add(module)
            return module
    return None


def clear_hooks(parameters: Iterable[torch.Tensor] | None = None) -> None:
    """Remove hooks that do nothing any more from the nodes that accumulate gradients.

    Other nodes go with their graph, but `DistributedDataParallel` keeps these. torch calls Python
    at each hook, also if all its functions were removed. No backward pass may run meanwhile.

    Args:
        parameters: Whose nodes; None for those of all such modules.
    """
    if native is None or dispatch_modes() or functorch_active():
        return  # The nodes are found by an operator, which the program's modes must not see.
    if parameters is None:
        reducing = (module for module in wrappers() if "reducer" in vars(module))
        parameters = [one for module in reducing for one, _ in reducible(module)]
    leaves = (one for one in parameters if one.requires_grad and one.is_leaf)
    nodes = [call_without_modes(call_quietly, accumulation_of, leaf) for leaf in leaves]
    native.clear_leaves(nodes)


class Bucket(NamedTuple):
    """A reduction of one bucket of gradients.

    Attributes:
        module: The `DistributedDataParallel` module.
        number: Its number among the buckets of the module; None for the map of the parameters that
            were used.
        occurrence: How many reductions there were of it in this backward pass.
        hook: The program's hook that reduces it, if there is one.
    """

    module: nn.Module
    number: int | None
    occurrence: int
    hook: str


class Reductions:
    """The reductions of one attachment.

    Attributes:
        passes: How many backward passes have ended since the last step of an optimizer.

    Args:
        session: The session.
        scopes: Names the parameters of modules.
        backward: The backward program.
        namespace: Namespace of the contexts.
    """

    def __init__(
        self, session: Session, scopes: Scopes, backward: BackwardProgram, namespace: str
    ) -> None:
        self._session, self._scopes, self._backward = session, scopes, backward
        self._namespace = namespace
        self._records: dict[tuple[str, str], tuple[Ref, _Reduction]] = {}
        #: Key of a bucket -> its name without a number, and its record.
        self._buckets: dict[tuple[Any, ...], tuple[str, OpRecord]] = {}
        #: Outermost module -> its class, which `fully_shard` changes, and the modules in it that
        #: were changed.
        self._sharded: weakref.WeakKeyDictionary[
            nn.Module, tuple[type[nn.Module], list[weakref.ref[nn.Module]]]
        ] = weakref.WeakKeyDictionary()
        #: Module -> an epoch, and the parameters by id whose gradients have no actions in it.
        self._idle: weakref.WeakKeyDictionary[nn.Module, tuple[int, dict[int, Ref]]] = (
            weakref.WeakKeyDictionary()
        )
        #: Module -> the epoch in which these are all of its parameters.
        self._settled: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._gradients: dict[int, _Gradient] = {}
        #: What there was in a pass after which no gradient had actions; see `_present`.
        self._rest: object = None
        self.passes = 0

    def wanted(self) -> bool:
        """Return True if a tool looks at backward ops of one of several processes."""
        return self._session.wants_backward and processes() > 1

    def skips(self) -> bool:
        """Return True, and count the pass, if no gradient that it may reduce has actions."""
        if self._rest is None or self._rest != self._present():
            return False
        _EXPECTED.clear()
        self.passes += 1
        return True

    def _present(self) -> object:
        """Return the epoch, the wrappers, and the outermost modules, which may be sharded."""
        roots = self._scopes.roots()
        kinds = [type(root) for root in roots]
        return self._session.epoch, [*WRAPPERS.values()], kinds, [*map(weakref.ref, roots)]

    def _is_at_rest(self) -> bool:
        """Return True if all modules that may reduce gradients are settled, and none is pending.

        Of several modules of `DistributedDataParallel`, a pass may reach one and not the others.
        """
        if not (self._session.caching and self._session.enabled):
            return False
        every = wrappers() + [
            part for root in self._scopes.roots() for part in self._sharded_of(root)
        ]
        are_settled = all(self._settled.get(one) == self._session.epoch for one in every)
        return are_settled and sum(hasattr(one, "reducer") for one in every) <= 1

    def record(self, op_type: str, bucket: Bucket) -> OpRecord | None:
        """Return the record of the reduction of a bucket; None if its module is not known."""
        scope = self._scopes.known(inner_of(bucket.module))
        if scope is None:
            return None
        what = "the parameters used" if bucket.number is None else f"bucket {bucket.number}"
        key = "reduce", what, bucket.occurrence, scope.root, scope.path, op_type
        known = self._buckets.get(key)
        if known is None:
            base = f"{scope.path}/reduction of {what}" if scope.path else f"reduction of {what}"
            same = 1 + sum(of == base for of, _ in self._buckets.values())
            name = f"{base}#{same}" if same > 1 else base
            path, zone = scope.path, "communication"
            site = Site(key, op_type, self._namespace, name, path, zone=zone)
            known = self._buckets[key] = base, OpRecord(site, "")
        return known[1]

    def begin(self) -> None:
        """Note the gradients before a backward pass."""
        self._gradients = {}
        if not self._session.enabled:
            return
        for module in self._modules():
            if self._session.caching and self._settled.get(module) == self._session.epoch:
                continue
            idle = self._idle_of(module)
            for parameter, _ in reducible(module):
                known = idle.get(id(parameter))
                if known is None or known() is not parameter:
                    self._gradients[id(parameter)] = _Gradient(parameter)

    def end(self) -> None:
        """Run the ops of the gradients that a backward pass has reduced."""
        before, self._gradients = self._gradients, {}
        number, self.passes = self.passes, self.passes + 1
        self._rest = self._present() if not before and self._is_at_rest() else None
        for module in self._modules() if before else ():
            changed = [
                (parameter, names)
                for parameter, names in reducible(module)
                if id(parameter) in before and before[id(parameter)].has_changed(parameter)
            ]
            if changed and reduces_now(module):
                _EXPECTED.discard(module)
                groups, idle = groups_of(module), self._idle_of(module)
                now_idle = [
                    parameter
                    for parameter, names in changed
                    if not self._run(module, parameter, names, groups, number)
                ]
                idle.update((id(parameter), Ref(parameter)) for parameter in now_idle)
                if "reducer" in vars(module):
                    clear_hooks(now_idle)
                if len(idle) == len([*reducible(module)]):
                    self._settled[module] = self._session.epoch

    def _idle_of(self, module: nn.Module) -> dict[int, Ref]:
        """Return the parameters of a module whose gradients have no actions in this epoch."""
        epoch, idle = self._idle.get(module, (0, {}))
        if epoch != self._session.epoch or not self._session.caching:
            epoch, idle = self._idle[module] = self._session.epoch, {}
        return idle

    def _modules(self) -> Iterator[nn.Module]:
        """Yield the modules that may reduce gradients in this backward pass."""
        for module in wrappers():
            if not hasattr(module, "reducer") or module in _EXPECTED:
                yield module
        for root in self._scopes.roots():
            yield from self._sharded_of(root)

    def _sharded_of(self, root: nn.Module) -> list[nn.Module]:
        """Return the modules in an outermost one that `fully_shard` has changed."""
        kind, sharded = self._sharded.get(root, (None, []))
        if kind is not type(root):
            found = [part for _, part in modules_in(root) if sharded_groups(part)]
            sharded = [weakref.ref(part) for part in found]
            self._sharded[root] = type(root), sharded
        return [part for one in sharded if (part := one()) is not None]

    def _run(
        self,
        module: nn.Module,
        parameter: torch.Tensor,
        same: Sequence[torch.Tensor],
        groups: Sequence[Any],
        number: int,
    ) -> bool:
        """Run the ops of one gradient; return False if it needs none in this epoch."""
        ranks = tuple(dict.fromkeys(rank for group in groups for rank in ranks_of(group)))
        keys = {"group": ranks, "micro_batch": number, **(STATE.chunk or {})}
        needs = [
            self._run_named(key, parameter, gradient, keys)
            for key, gradient in self._named(module, parameter, same)
        ]
        return any(needs)

    def _named(
        self, module: nn.Module, parameter: torch.Tensor, same: Sequence[torch.Tensor]
    ) -> Iterator[tuple[tuple[str, str], Any]]:
        """Yield the root and the name of each parameter that one holds, with its gradient."""
        parts = [*shards_in(parameter)]
        for name, owner, start, length in parts:
            if length and (scope := self._scopes.known(owner)) is not None:
                path = f"{scope.path}.{name}" if scope.path else name
                part = call_quietly(torch.Tensor.narrow, parameter.grad, 0, start, length)
                yield (scope.root, path), part
        if not parts and (scope := self._scopes.known(inner_of(module))) is not None:
            names = (self._scopes.weight_name(scope, one) for one in (parameter, *same))
            if (found := next((one for one in names if one is not None), None)) is not None:
                yield (scope.root, found), parameter.grad
            else:
                self._session.note_call(REDUCE_GRAD, "a parameter without a name")

    def _run_named(
        self, key: tuple[str, str], parameter: torch.Tensor, gradient: Any, keys: dict[str, Any]
    ) -> bool:
        """Run the op of the gradient of a parameter of this root and name, as `_run` does."""
        name = key[1]
        held = self._records.get(key)
        if held is None or held[0]() is not parameter:
            if held is not None and held[1].context is not None:
                self._session.forget(held[1].context)
            site = Site(
                key=("reduce", ("parameter", *key)),
                op_type=REDUCE_GRAD,
                namespace=self._namespace,
                name=f"{name}:{REDUCE_GRAD}",
                module_path=name.rpartition(".")[0],
            )
            held = self._records[key] = Ref(parameter), _Reduction(self._backward, site, None)
        record = held[1]
        if record.idle(self._session):
            return False
        record.keys = keys
        record.run(self._session, gradient)
        return not record.idle(self._session)


class _Gradient:
    """The gradient of a parameter before a backward pass."""

    def __init__(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        self._held = None if gradient is None else weakref.ref(gradient)
        self._written = None if gradient is None else version_of(FACTS.local(gradient))

    def has_changed(self, parameter: torch.Tensor) -> bool:
        gradient = parameter.grad
        if gradient is None:
            return False
        held = None if self._held is None else self._held()
        return held is not gradient or self._written != version_of(FACTS.local(gradient))


class _Reduction(NodeRecord):
    """The op of one parameter.

    Attributes:
        keys: Keys of its context in this execution.
    """

    __slots__ = ("keys",)

    keys: dict[str, Any]

    def open_context(self, session: Session) -> OpContext:
        """Open its context for this execution."""
        context = super().open_context(session)
        context.update(self.keys)
        return context

    def run(self, session: Session, gradient: Any) -> None:
        """Analyse it, and run its routines; an edit is written into the gradient."""
        context = self.open_context(session)
        kind: type = type(gradient)
        if distributed(kind):
            mesh = gradient.device_mesh
            context["mesh"] = tuple(mesh.shape)  # `mesh.mesh` computes it.
            context["placements"] = tuple(str(one) for one in gradient.placements)
        try:
            acts = False
            for point, values in _POINTS:
                context.execution[values] = [gradient]
                plan = analysed(context, point)
                if plan.replacement is not None:
                    raise UnsupportedError(
                        "The reduction of a gradient cannot be replaced",
                        where=plan.replacement.where,
                        fix="Edit the gradient before it, at AccumulateGrad, or after it",
                    )
                for step in plan.steps:
                    acts = True
                    for _, new in changes_of(step, [gradient], ()):
                        write_argument(FACTS.local(gradient), FACTS.local(new), step)
            if not acts and session.caching:
                self.settled = session.epoch
        finally:
            context.release()
