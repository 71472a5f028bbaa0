"""A complete eager driver of the framework `toy`, written against the public interface only.

`registered` makes it available, so that tools can be tried without a framework. It shows facts and
site keys, analysis at the first execution, plans cached for an epoch, values edited beside the
tape, raw backward ops, and aligned gradients by gates around an op. It is one long file so that it
can be read from top to bottom.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from amanda_core import (
    CoverageGap,
    DriverInfo,
    Finding,
    IPoint,
    OpContext,
    Plan,
    Session,
    Site,
    discovery,
    hookimpl,
)
from amanda_core.facts import Facts, Storage
from amanda_core.testing import toy

__all__ = ["ToyDriver", "registered"]

T = TypeVar("T")

NAMESPACE = "toy/1.2.3/eager"
VOCABULARY = {"linear": "linear", "add": "add", "mul": "mul", "relu": "relu", "total": "sum"}
CAPABILITIES = frozenset(
    {
        "eager",
        "gradients",
        "aligned_gradients",
        "late_gradients",
        "replace",
        "replace_backward",
        "autodiff",
        "observers",
        "steps",
        "scopes",
        "scope_events",
        "calls",
        "ordered",
        "facts",
    }
)
#: Modules that are not the user's program.
OWN = {__name__, toy.__name__}
REPLACED = ("dispatch", "backward", "scope_entered", "scope_left", "update")


@dataclass(frozen=True)
class Planned:
    """The plans of one op, and the epoch for which they hold."""

    epoch: int
    context: OpContext
    before: Plan
    after: Plan
    aligned_before: Plan
    aligned_after: Plan

    @property
    def is_empty(self) -> bool:
        """Return True if nothing was requested."""
        return not (self.before or self.after or self.aligned_before or self.aligned_after)


class ToyFacts(Facts):
    """Facts about tensors: a `toy.Value` is a number of 8 bytes; a gradient is a plain float."""

    def is_tensor(self, value: Any) -> bool:
        """Return True for a value of the framework."""
        return isinstance(value, toy.Value)

    def dtype(self, tensor: toy.Value) -> str:
        """Return the type of Python's floats."""
        return "float64"

    def shape(self, tensor: toy.Value) -> tuple[int, ...]:
        """Return the shape of a single number."""
        return ()

    def nbytes(self, tensor: toy.Value) -> int:
        """Return the size of one number."""
        return 8

    def storage(self, tensor: toy.Value) -> Storage:
        """Return the memory of the value, which it shares with no other."""
        return Storage(id(tensor), 8, tensor)

    def tensor(self, values: Any, like: toy.Value) -> toy.Value:
        """Return a value of a number."""
        return toy.Value(float(values))

    def values(self, tensor: toy.Value) -> float:
        """Return the number."""
        return tensor.data


class ToyDriver:
    """The plugin.

    Args:
        name: First part of the namespace.
        modules: Modules whose import means that the framework is in use.
        capabilities: The capabilities that it declares.
        api: The interface number that it declares.

    Attributes:
        facts: Its facts about values; None for a driver without facts.
    """

    def __init__(
        self,
        name: str = "toy",
        modules: tuple[str, ...] = ("toy",),
        capabilities: frozenset[str] | Mapping[str, frozenset[str]] = CAPABILITIES,
        api: int = 2,
    ) -> None:
        self.info = DriverInfo(
            name, modules, (f"{name}/*/eager",), capabilities, VOCABULARY, api=api
        )
        self.loaded = True
        self.facts: Facts | None = ToyFacts()
        self.attachments: dict[int, ToyAttachment] = {}
        self.detached = 0
        self.prepared: list[str] = []
        self.found: dict[str, Any] = {}
        self._lock = threading.Lock()

    @hookimpl
    def amanda_driver_info(self) -> DriverInfo:
        """Describe the driver."""
        return self.info

    @hookimpl
    def amanda_preflight(self) -> Sequence[Finding]:
        """Report a finding about the environment."""
        return [Finding("info", "The toy framework has one version")]

    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        """Set the common type of an operator of the toy framework, and the roles of its inputs."""
        if context.namespace.startswith(f"{self.info.name}/"):
            self.prepared.append(context.op_type)
            if context.is_forward():
                context["type"] = VOCABULARY.get(context.op_type)
                if context.op_type == "linear":
                    context["input_roles"] = ("input", "weight", "bias")

    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        """Start to intercept for a session, in the thread that calls."""
        if not self.loaded:
            return None
        with self._lock:
            if not self.attachments:
                self._replace()
            attachment = ToyAttachment(self, session)
            self.attachments[attachment.thread] = attachment
        return attachment

    def release(self, attachment: ToyAttachment) -> None:
        """Release an attachment; the last one restores the framework."""
        with self._lock:
            del self.attachments[attachment.thread]
            self.detached += 1
            if not self.attachments:
                for name in REPLACED:
                    setattr(toy, name, self.found.pop(name))

    def _replace(self) -> None:
        self.found = {name: getattr(toy, name) for name in REPLACED}
        for name in REPLACED:
            setattr(toy, name, self._routed(name))

    def _routed(self, name: str) -> Callable[..., Any]:
        # Other threads run without tools.
        def replacement(*args: Any, **kwargs: Any) -> Any:
            attachment = self.attachments.get(threading.get_ident())
            if attachment is None:
                return self.found[name](*args, **kwargs)
            return getattr(attachment, name)(*args, **kwargs)

        return replacement


@contextmanager
def registered() -> Iterator[ToyDriver]:
    """Register a driver of the toy framework inside `with`, as if it were installed.

    ``with registered(), amanda.apply(tool): toy.relu(toy.Value(1.0))``
    """
    for found in discovery.drivers():
        if isinstance(found.plugin, ToyDriver):
            yield found.plugin
            return
    driver = ToyDriver(modules=(toy.__name__,))
    discovery.register(driver, "toy", "amanda_core.testing.toy_driver")
    try:
        yield driver
    finally:
        discovery.unregister("toy")


class ToyAttachment:
    """Holds the framework for one session."""

    def __init__(self, driver: ToyDriver, session: Session) -> None:
        self.driver = driver
        self.facts = driver.facts
        self.session = session
        self.thread = threading.get_ident()
        self.vanilla = dict(driver.found)
        self.planned: dict[Any, Planned] = session.persistent("toy.planned", dict)
        self.leaves: list[tuple[toy.Node, Any]] = []

    def detach(self) -> None:
        """Restore the framework."""
        for node, wrapper in self.leaves:
            node.wrappers.remove(wrapper)
        self.driver.release(self)

    def isolate(self) -> AbstractContextManager[object]:
        """Disable recording for backward inside `with`."""
        return toy.no_grad()

    def coverage(self) -> Sequence[CoverageGap]:
        """Describe what is not instrumented."""
        return [CoverageGap("Value.data", "an attribute is read without dispatch")]

    # Replacements of the framework's functions.

    def scope_entered(self, path: str) -> None:
        """Tell the tools."""
        if self.session.watches_calls and "." not in path:
            self.session.calls.enter(NAMESPACE, path, (), {})
        if self.session.watches_scopes:
            self.session.enter_scope(path)

    def scope_left(self, path: str) -> None:
        """Tell the tools."""
        if self.session.watches_scopes:
            self.session.leave_scope(path)
        if self.session.watches_calls and "." not in path:
            self.session.calls.leave()

    def update(self, *args: Any) -> None:
        """End a step."""
        self.vanilla["update"](*args)
        self.session.end_step()

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """Run the backward program, and raise what a routine raised in another thread."""
        self.vanilla["backward"](*args, **kwargs)
        self.session.raise_pending()

    def dispatch(self, op: toy.Op, arguments: list[Any]) -> tuple[toy.Value, ...]:
        """Run an operator as it was planned, or analyse it first."""
        session = self.session
        if not session.enabled:
            return self._original(op, arguments)
        key = (toy.scope_path(), op.name, *_call_site())
        planned = self.planned.get(key) if session.caching else None
        if planned is None or planned.epoch != session.epoch:
            return self._analyse(op, arguments, key)
        if planned.is_empty and not session.wants_backward:
            return self._original(op, arguments)
        arguments = self._fold(planned.before, arguments)
        gated, gate = self._exit(planned, arguments)
        outputs = self._taped(planned, gated, gate, self._run(op, planned.before, gated))
        return tuple(self._fold(planned.after, outputs))

    # Forward.

    def _original(self, op: toy.Op, arguments: list[Any]) -> tuple[toy.Value, ...]:
        outputs: tuple[toy.Value, ...] = self.vanilla["dispatch"](op, arguments)
        return outputs

    def _analyse(self, op: toy.Op, arguments: list[Any], key: Any) -> tuple[toy.Value, ...]:
        session = self.session
        path, _, function, offset, line = key
        site = Site(
            key=(path, op.name, function, offset),
            op_type=op.name,
            namespace=NAMESPACE,
            name=f"{path}/{op.name}" if path else op.name,
            module_path=path,
            source=line,
        )
        epoch = session.epoch
        context = session.open(site, op, arguments, input_names=tuple(op.inputs))
        try:
            with self.isolate():
                before = context.trigger_callback(IPoint.BEFORE_FORWARD)
            arguments = self._fold(before, arguments)
            # Only the analysis after the op tells whether gradients are needed.
            late: list[Planned] = []
            gated, gate = self._exit(late, arguments)
            outputs = self._run(op, before, gated)
            context.fill(outputs=outputs)
            with self.isolate():
                after = context.trigger_callback(IPoint.AFTER_FORWARD)
            planned = Planned(
                epoch,
                context,
                before,
                after,
                context.plan(IPoint.BEFORE_BACKWARD),
                context.plan(IPoint.AFTER_BACKWARD),
            )
            late.append(planned)
            self.planned[key] = planned
            outputs = self._taped(planned, gated, gate, outputs)
            return tuple(self._fold(after, outputs))
        finally:
            context.release()

    def _run(self, op: toy.Op, before: Plan, arguments: list[Any]) -> tuple[toy.Value, ...]:
        if before.replacement is None:
            return self._original(op, arguments)
        result = before.replacement.replace(arguments)
        return tuple(result) if isinstance(result, (tuple, list)) else (result,)

    def _fold(self, plan: Plan, values: Sequence[Any]) -> list[Any]:
        # Run the steps one by one, because each decides by itself whether the tape records it.
        new = list(values)
        for step in plan:
            with nullcontext() if step.action.autodiff else self.isolate():
                changed = step(new)
            for position, value in changed:
                new[position] = value if step.action.autodiff else _beside(value, new[position])
        return new

    # Backward.

    @property
    def _active(self) -> bool:
        if self.session.closed:
            self.session.warn_once(
                "backward runs after the tools were left; their routines do not run"
            )
            return False
        return self.session.enabled

    def _guarded(self, function: Callable[[], T], default: T) -> T:
        if threading.get_ident() == self.thread:
            return function()
        try:
            return function()
        except BaseException as error:
            self.session.defer(error)
            return default

    def _exit(
        self, planned: Planned | list[Planned], arguments: list[Any]
    ) -> tuple[list[Any], toy.Node]:
        """Put a gate below the op, for its contributions to its inputs' gradients."""
        edges = [value.edge if value is not None else None for value in toy.flat(arguments)]
        # Do not keep the arguments: the tape would keep them alive.
        lengths = [len(a) if isinstance(a, list) else None for a in arguments]

        def run(gradients: toy.Gradients) -> toy.Gradients:
            plans = planned if isinstance(planned, Planned) else planned[0]
            if not plans.aligned_after or not self._active:
                return gradients
            with self.isolate():
                return self._guarded(
                    lambda: _flat(plans.aligned_after(_nested(gradients, lengths))), gradients
                )

        gate = toy.Node("", run, edges, arity=len(edges))
        slots: Iterator[int] = iter(range(len(edges)))

        def through(value: toy.Value | None) -> toy.Value | None:
            slot = next(slots)
            if value is None or value.edge is None:
                return value
            return toy.Value(value.data, (gate, slot), name=value.name)

        gated = [[through(v) for v in a] if isinstance(a, list) else through(a) for a in arguments]
        return gated, gate

    def _taped(
        self,
        planned: Planned,
        arguments: list[Any],
        exit_gate: toy.Node,
        outputs: tuple[toy.Value, ...],
    ) -> tuple[toy.Value, ...]:
        """Watch the backward ops of an op, and put a gate above them if one is needed."""
        if self.session.wants_backward:
            for ordinal, node in enumerate(_between(outputs, exit_gate)):
                self._watch(node, (ordinal, node.name), planned.context)
            for edge in exit_gate.edges:
                if edge is not None and edge[0].name == "AccumulateGrad":
                    self._watch_leaf(edge[0])
        if not planned.aligned_before:
            return outputs
        replacement = planned.aligned_before.replacement
        slots: list[toy.Edge | None] = [(exit_gate, i) for i in range(exit_gate.arity)]

        def run(gradients: toy.Gradients) -> toy.Gradients:
            nothing = [None] * len(slots)
            if not self._active:
                return [*gradients, *nothing]
            with self.isolate():
                new = self._guarded(lambda: planned.aligned_before(gradients), list(gradients))
                if replacement is None:
                    return [*new, *nothing]
                results = _as_list(replacement.replace(new))
            flat = _flat(results)
            return [*[None] * len(outputs), *flat, *nothing[len(flat) :]]

        entry = toy.Node("", run, [*(output.edge for output in outputs), *slots], len(outputs))
        return tuple(
            toy.Value(output.data, (entry, index) if output.edge is not None else None)
            for index, output in enumerate(outputs)
        )

    def _watch_leaf(self, node: toy.Node) -> None:
        if all(node is not seen for seen, _ in self.leaves):
            wrapper = self._watch(node, ("leaf", len(self.leaves)), None)
            self.leaves.append((node, wrapper))

    def _watch(self, node: toy.Node, key: tuple[Any, ...], forward: OpContext | None) -> Any:
        def wrapper(run: toy.Run, gradients: toy.Gradients) -> toy.Gradients:
            if not self._active:
                return run(gradients)
            return self._backward_op(node, key, forward, run, gradients)

        node.wrappers.append(wrapper)
        return wrapper

    def _backward_op(
        self,
        node: toy.Node,
        key: tuple[Any, ...],
        forward: OpContext | None,
        run: toy.Run,
        gradients: toy.Gradients,
    ) -> toy.Gradients:
        name = f"{forward.name}/{node.name}" if forward is not None else node.name
        site = Site(key=key, op_type=node.name, namespace=NAMESPACE, name=name)
        context = self.session.open(site, node, forward=forward, backward=True)
        try:
            context.fill(grad_outputs=gradients)
            with self.isolate():
                before = self._guarded(
                    lambda: context.trigger_callback(IPoint.BEFORE_BACKWARD), Plan()
                )
                gradients = self._guarded(lambda: before(gradients), list(gradients))
                if before.replacement is not None:
                    results: toy.Gradients = _as_list(before.replacement.replace(gradients))
                else:
                    results = run(gradients)
                context.fill(grad_inputs=results)
                after = self._guarded(
                    lambda: context.trigger_callback(IPoint.AFTER_BACKWARD), Plan()
                )
                return self._guarded(lambda: after(results), list(results))
        finally:
            context.release()


def _call_site() -> tuple[str, int, str]:
    """Return function, bytecode offset and ``file:line`` of the first frame outside."""
    frame = sys._getframe(1)
    while frame.f_globals["__name__"] in OWN:
        assert frame.f_back is not None
        frame = frame.f_back
    code = frame.f_code
    file = code.co_filename.rpartition("/")[2]
    return code.co_name, frame.f_lasti, f"{file}:{frame.f_lineno}"


def _beside(new: Any, old: Any) -> Any:
    """Return the new value at the old one's place on the tape: gradients pass straight through."""
    if isinstance(new, list):
        return [_beside(n, o) for n, o in zip(new, old, strict=True)]
    if new is None or old is None:
        return new
    return toy.Value(new.data, old.edge, name=old.name)


def _between(outputs: Sequence[toy.Value], gate: toy.Node) -> list[toy.Node]:
    """Return the backward nodes of an op, from its outputs down to the gate below it."""
    found: dict[toy.Node, None] = {}
    waiting = [output.edge for output in outputs]
    while waiting:
        edge = waiting.pop(0)
        if edge is not None and edge[0] is not gate and edge[0] not in found:
            found[edge[0]] = None
            waiting.extend(edge[0].edges)
    return list(found)


def _nested(gradients: toy.Gradients, lengths: Sequence[int | None]) -> list[Any]:
    """Return gradients by position: a list for an input that is a list, else one."""
    rest = iter(gradients)
    return [
        next(rest) if length is None else [next(rest) for _ in range(length)] for length in lengths
    ]


def _flat(gradients: Sequence[Any]) -> list[float | None]:
    opened: list[float | None] = []
    for gradient in gradients:
        opened.extend(gradient if isinstance(gradient, list) else [gradient])
    return opened


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def plans_of(driver: ToyDriver, session: Session) -> Mapping[Any, Planned]:
    """Return the plans that the driver has cached for a session."""
    planned: dict[Any, Planned] = session.persistent("toy.planned", dict)
    return planned
