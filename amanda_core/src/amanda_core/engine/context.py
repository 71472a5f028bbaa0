"""`OpContext`: everything known of one op, and the requests of the analysis routines.

Owns the inspection and instrumentation APIs of the paper (listings 3 and 4), whose names and
signatures hold as printed. Records actions; `session` runs the analysis, `plan` the routines. One
class of over 400 lines, half of them documentation: the paper's API is one class.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, cast

from amanda_core.engine.action import POINTS, Action, ActionKind, IPoint, Positions, Routine
from amanda_core.engine.plan import EMPTY, Plan, Step
from amanda_core.engine.requests import (
    COUNTED,
    OF_INPUTS,
    POSITION_NAMES,
    bad_positions,
    check_weights,
    of_logical_values,
    refusal,
    refuse_misspelt,
    require,
)
from amanda_core.errors import (
    ActionError,
    PositionError,
    ReplacementConflictError,
    StaleContextError,
)
from amanda_core.identity.identity import stable_id

if TYPE_CHECKING:
    from amanda_core.engine.session import Session
    from amanda_core.engine.tool import Tool
    from amanda_core.interface.driver import Site
    from amanda_core.interface.facts import Facts
    from amanda_core.weights.reads import Reads

__all__ = ["OpContext"]

_, _AFTER_FORWARD, _BEFORE_BACKWARD, _ = POINTS
#: Where `OpContext.execution` has values.
_VALUES = ("inputs", "outputs", "grad_outputs", "grad_inputs")
#: What `fill` sets beside them; `Session.open` sets all.
FACTS = ("op", "attrs", "input_names", "constant", "recomputed")
_UNSET: Any = type("_Unset", (), {"__repr__": lambda self: "<unset>"})()


class OpContext(dict[str, Any]):
    """Context of one forward op, or of one backward op, in one session.

    Tools write keys for one another; keys persist while the tensors are valid only during the call
    of a routine. A backward context reads through to the context of its forward op and writes
    locally. The keys ``type`` and ``backward_type`` are always there, with None if unknown.

    Made by drivers through `Session.open`.
    """

    # Faster to set and read than a dictionary.
    __slots__ = (
        *("__dict__", "__weakref__", "_analysed", "_backward", "_edits", "_epoch", "_forward"),
        *("_has_actions", "_is_common", "_key", "_known", "_number", "_output_count", "_place"),
        *("_outputs_vary", "_plans", "_recorder", "_site", "_store", "execution", "remembered"),
    )

    # A context represents an op, so two contexts are equal only if they are the same object.
    __hash__: ClassVar[Callable[[Any], int]] = object.__hash__  # type: ignore[assignment]
    #: The key under which the store holds it; set by the session.
    _place: tuple[Hashable, ...]
    #: Whether tools see it unless they select others; set by the session.
    _is_common: bool

    def __init__(
        self, session: Session, site: Site, forward: OpContext | None, backward: bool
    ) -> None:
        self._store = session._store
        self._site, self._forward, self._backward = site, forward, backward
        self._number: int | None = None
        self._key = next(session._store.keys)
        #: What `fill` sets and `release` keeps: facts about the op besides its values.
        self._known: dict[str, Any] = {}
        #: For drivers: what `fill` has set for the current execution. Values are under "inputs",
        #: "outputs", "grad_outputs" and "grad_inputs"; "open" is true from `fill` to `release`;
        #: "op" may hold the operator of this execution alone, and "closed" why there are no values
        #: in routines. Native code may write it itself.
        self.execution: dict[str, Any] = {}
        #: For drivers: weak forms (`weak.weakly`) of the last execution's values, for its backward
        #: routines. Native code may write it itself.
        self.remembered: dict[str, Any] = {}
        self._recorder: tuple[Tool, IPoint, list[Action]] | None = None
        self._plans: dict[IPoint, Plan] | None = None
        #: Number of outputs for which the op was analysed.
        self._output_count: int | None = None
        #: Whether a tool has ever requested an action here, the last; set by the session.
        self._epoch, self._outputs_vary, self._has_actions = -1, False, False
        #: Kind of action and position -> serials of the tools that changed the value there.
        self._edits: dict[tuple[ActionKind, int], set[int]] = {}
        #: Point -> epoch in which no analysis was due there any more.
        self._analysed: dict[IPoint, int] = {}
        if forward is None:
            self["type"] = None
        self["backward_type"] = None

    # Reading through from a backward context to its forward op.

    def __missing__(self, key: str) -> Any:
        if self._forward is not None:
            return self._forward[key]
        raise KeyError(key)

    def __contains__(self, key: object) -> bool:
        return super().__contains__(key) or (self._forward is not None and key in self._forward)

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` here or in the forward context, or else `default`."""
        if self._forward is None:
            return super().get(key, default)
        return self[key] if key in self else default  # noqa: SIM401  This is `get`.

    def setdefault(self, key: str, default: Any = None) -> Any:
        """Return the value of `key` here or in the forward context, or else set `default`."""
        return self[key] if key in self else super().setdefault(key, default)

    def __eq__(self, other: object) -> bool:
        return self is other

    def __ne__(self, other: object) -> bool:
        return self is not other

    def __repr__(self) -> str:
        side = "backward" if self._backward else "forward"
        return f"<OpContext {side} {self.name!r} {dict(self)!r}>"

    # Inspection API (paper, listing 4).

    def get_op(self) -> Any:
        """Return the backend's raw operator, or the raw backward op if it has no forward op."""
        return self._forward.get_op() if self._forward is not None else self._raw()

    def get_op_id(self) -> int:
        """Return the id of the operator, the same number in every iteration."""
        return self._forward.get_op_id() if self._forward is not None else self._id

    def get_inputs(self) -> Any:
        """Return the inputs by position of the op's signature; None without a forward op."""
        return self._read("inputs", of_forward=True)

    def get_outputs(self) -> Any:
        """Return the outputs by position; None before the op has run."""
        return self._read("outputs", of_forward=True)

    def get_backward_op(self) -> Any:
        """Return the raw backward operator; None in a forward context."""
        return self._raw() if self._backward else None

    def get_backward_op_id(self) -> int | None:
        """Return the id of the backward op, fixed across iterations; None in a forward context."""
        return self._id if self._backward else None

    def get_grad_outputs(self) -> Any:
        """Return the gradients of the outputs by position; None in a forward context."""
        return self._read("grad_outputs", of_forward=False)

    def get_grad_inputs(self) -> Any:
        """Return the gradients of the inputs by position; None before the backward op has run."""
        return self._read("grad_inputs", of_forward=False)

    op = property(get_op)
    op_id = property(get_op_id)
    inputs = property(get_inputs)
    outputs = property(get_outputs)
    backward_op = property(get_backward_op)
    backward_op_id = property(get_backward_op_id)
    grad_outputs = property(get_grad_outputs)
    grad_inputs = property(get_grad_inputs)

    def is_forward(self) -> bool:
        """Return True if this is the context of a forward op."""
        return not self._backward

    def is_backward(self) -> bool:
        """Return True if this is the context of a backward op."""
        return self._backward

    @property
    def forward(self) -> OpContext | None:
        """Context of the forward op of a backward context; None if there is none."""
        return self._forward

    @property
    def namespace(self) -> str:
        """``framework/version/mode``."""
        return self._site.namespace

    @property
    def site(self) -> Site:
        """The constant facts that the driver passed."""
        return self._site

    @property
    def op_type(self) -> str:
        """The backend's own name of this operator or backward operator."""
        return self._site.op_type

    @property
    def name(self) -> str:
        """Readable name, such as ``encoder.layer.3.attention.self.query/linear``."""
        return self._site.name

    @property
    def module_path(self) -> str:
        """Path of the module in which the op runs; empty outside any module."""
        return self._site.module_path

    @property
    def source(self) -> str | None:
        """``file:line`` of the call, or None."""
        return self._site.source

    @property
    def zone(self) -> str:
        """``model``, or which other part of a program: ``optimizer``, ``init``, ``data``,
        ``metrics``, or a name that the program gave it with `amanda.zone`.
        """
        return self._site.zone

    @property
    def input_names(self) -> tuple[str, ...]:
        """Names of the input positions, as far as known."""
        return self._of_op("input_names")  # type: ignore[no-any-return]

    @property
    def attrs(self) -> Mapping[str, Any]:
        """Arguments that are not positions, such as ``dtype`` or a graph node's attributes."""
        return self._of_op("attrs")  # type: ignore[no-any-return]

    @property
    def recomputed(self) -> bool:
        """True if this execution repeats an earlier one (activation checkpointing)."""
        return self._of_op("recomputed")  # type: ignore[no-any-return]

    @property
    def where(self) -> str:
        """Op name, id, module path and source line, for messages."""
        module = f", module {self.module_path!r}" if self.module_path else ""
        source = f", at {self.source}" if self.source else ""
        return f"op {self.name!r} (id {self._id}{module}{source})"

    def value(self, position: int, item: int | None = None) -> Any:
        """Return the concrete value of a parameter or constant input, in every execution mode.

        Args:
            position: Input position of the op's signature.
            item: Index in this input, if it is a list, such as that of a concatenation; None for
                all of it.

        Returns:
            The value, or None if it is computed or not known yet.

        Raises:
            PositionError: The op has no such input.
        """
        inputs = self.get_inputs()
        if inputs is None:
            return None
        if not 0 <= position < len(inputs):
            wrong = f"The op has no input {position}: it has {len(inputs)}"
            raise PositionError(wrong, where=self.where, fix=COUNTED)
        constant = self._of_op("constant") or (lambda value: value)
        return constant(inputs[position] if item is None else inputs[position][item])

    @property
    def weights(self) -> Reads:
        """The parameters that this execution reads, by input position; also available in routines.

        For a view of a parameter (an index, a slice, a transpose), it is the part that the view
        shows. Empty if the driver does not report where tensors lie in memory.
        """
        reads: Reads | None = self.execution.get("weights")
        if reads is None:
            from amanda_core.weights.reads import reads_of

            reads = reads_of(self, self._store.persistent)
            self.execution["weights"] = reads
        return reads

    def supports(self, capability: str) -> bool:
        """Return True if the driver has `capability` where this op runs.

        Args:
            capability: Such as ``replace`` or ``ordered``; the drivers' guide lists them.
        """
        return self._store.session.can(capability, self.namespace)

    @property
    def facts(self) -> Facts | None:
        """The driver's facts about tensors (dtype, shape, values, ...); None if it has none.

        A tool uses this and does not inspect values itself. It may keep the object for its
        routines.
        """
        return self._store.session.facts(self.namespace)

    # Instrumentation API (paper, listing 3).

    def insert_before_op(
        self,
        func: Routine,
        inputs: Positions = None,
        *,
        observe: bool = False,
        logical: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call `func` with the selected inputs each time before the op runs.

        Args:
            func: The instrumentation routine. It returns None (unchanged), one value, or as many
                values as it was given.
            inputs: Positions of the op's signature, or None for all.
            observe: Promise that `func` only observes and returns None. The driver then does not
                change the program for it, and runs the program without it where it cannot observe.
                It may call `func` after later ops have run, in the same order, unless the tool is
                `immediate`.
            logical: Give an observer each value that processes hold in parts as a whole, as
                `Facts.whole` returns it. They communicate for this, so the tool must be applied
                in all of them. Without it `func` gets the part of this process.
            **kwargs: Passed on to `func` by reference.

        Raises:
            LateActionError: The op has already run at this point of the analysis.
            PositionError: The op has no such input.
        """
        self._record(ActionKind.INSERT_BEFORE_OP, func, inputs, kwargs, observe, logical)

    def insert_after_op(
        self,
        func: Routine,
        outputs: Positions = None,
        *,
        observe: bool = False,
        logical: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call `func` with the selected outputs each time after the op has run.

        Arguments, results and errors are those of `insert_before_op`.
        """
        self._record(ActionKind.INSERT_AFTER_OP, func, outputs, kwargs, observe, logical)

    def insert_before_backward_op(
        self,
        func: Routine,
        grad_outputs: Positions = None,
        *,
        grad_out: Positions = None,
        observe: bool = False,
        logical: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call `func` with the selected gradients each time before the backward op runs.

        In a forward context position i is the whole gradient of output i of the op (the aligned
        view). In a backward context it is the gradient that arrives at this backward op (the raw
        view). `grad_out` is the paper's other spelling; `observe` and `logical` are those of
        `insert_before_op`.
        """
        positions = self._one_of(grad_outputs, grad_out, "grad_outputs", "grad_out")
        self._record(
            ActionKind.INSERT_BEFORE_BACKWARD_OP, func, positions, kwargs, observe, logical
        )

    def insert_after_backward_op(
        self,
        func: Routine,
        grad_inputs: Positions = None,
        *,
        grad_in: Positions = None,
        observe: bool = False,
        logical: bool = False,
        **kwargs: Any,
    ) -> None:
        """Call `func` with the selected gradients each time after the backward op has run.

        In a forward context position i is what this op contributes to the gradient of its input i
        (the aligned view). In a backward context it is the i-th result of this backward op (the raw
        view). `grad_in` is the paper's other spelling; `observe` and `logical` are those of
        `insert_before_op`.
        """
        positions = self._one_of(grad_inputs, grad_in, "grad_inputs", "grad_in")
        self._record(ActionKind.INSERT_AFTER_BACKWARD_OP, func, positions, kwargs, observe, logical)

    def replace_op(self, func: Routine, inputs: Positions = None, **kwargs: Any) -> None:
        """Run `func` with the selected inputs instead of the op; it returns the op's result.

        Its computation is differentiated as written. To remove an op, replace it by the identity.

        Raises:
            ReplacementConflictError: Another applied tool replaces this op as well.
        """
        self._record(ActionKind.REPLACE_OP, func, inputs, kwargs)

    def replace_backward_op(
        self,
        func: Routine,
        grad_outputs: Positions = None,
        *,
        grad_out: Positions = None,
        **kwargs: Any,
    ) -> None:
        """Run `func` with the selected gradients instead of the backward op.

        It returns the gradients of the inputs. In a forward context there is one for each leading
        input up to the last differentiable one, or a single value if only one input is
        differentiable. In a backward context there is one for each result of this backward op.
        """
        positions = self._one_of(grad_outputs, grad_out, "grad_outputs", "grad_out")
        self._record(ActionKind.REPLACE_BACKWARD_OP, func, positions, kwargs)

    # For drivers.

    def trigger_callback(self, i_point: IPoint) -> Plan:
        """Run the analysis that is due at `i_point` and return the plan for that point.

        Args:
            i_point: A forward point in a forward context, a backward one in a backward context.
        """
        session = self._store.session
        after = i_point is _AFTER_FORWARD
        if after and self._output_count != (count := self._count("outputs")):
            if self._output_count is not None:
                # An op such as `split` has another number of outputs, so other positions.
                session.analyse_again(self, i_point)
                self._outputs_vary = True
            self._output_count = count
        # Each of these calls is left out where it does nothing: every execution comes by here.
        if session._analysing[i_point]:
            session.analyse(self, i_point)
        if (plans := self._plans) is None or self._epoch != session.epoch:
            plans = self.plans()
        if after and plans and _BEFORE_BACKWARD in plans:
            self._check_aligned_outputs(plans[_BEFORE_BACKWARD])
        return plans.get(i_point, EMPTY)

    def plan(self, i_point: IPoint) -> Plan:
        """Return the current plan of a point without running analysis.

        The backward points of a forward context are the aligned view.

        Raises:
            ReplacementConflictError: Two applied tools replace this op.
        """
        return self.plans().get(i_point, EMPTY)

    def plans(self) -> dict[IPoint, Plan]:
        """Return the current plans, of the points that have any, without running analysis."""
        session = self._store.session
        if self._plans is None or self._epoch != session.epoch:
            self._plans = self._make_plans() if self._has_actions else {}
            self._epoch = session.epoch
        return self._plans

    def fill(
        self,
        *,
        op: Any = _UNSET,
        inputs: Sequence[Any] | None = _UNSET,
        outputs: Sequence[Any] | None = _UNSET,
        grad_outputs: Sequence[Any] | None = _UNSET,
        grad_inputs: Sequence[Any] | None = _UNSET,
        attrs: Mapping[str, Any] = _UNSET,
        input_names: tuple[str, ...] = _UNSET,
        constant: Callable[[Any], Any] | None = _UNSET,
        recomputed: bool = _UNSET,
    ) -> None:
        """Set the facts and values of the current execution."""
        execution, known = self.execution, self._known
        execution["open"] = True
        # Neither `strict` nor `update`: each execution of an op comes by here.
        for what, values in zip(_VALUES, (inputs, outputs, grad_outputs, grad_inputs)):  # noqa: B905
            if values is not _UNSET:
                execution[what] = values
        for what, fact in zip(FACTS, (op, attrs, input_names, constant, recomputed)):  # noqa: B905
            if fact is not _UNSET:
                known[what] = fact

    def release(self) -> None:
        """Release the tensors at the end of an execution; keys and facts stay.

        A forward context keeps weak references to its values. So a backward routine still finds
        those that are alive anyway, above all parameters, and None in place of the others.
        """
        if self._backward:
            # A backward operator object keeps its part of the graph alive.
            self._known["op"] = None
        elif self._store.session.wants_backward:
            self.remember()
        self.execution.clear()

    def remember(self) -> None:
        """Remember the values of the current execution weakly, for its backward routines."""
        execution = self.execution
        weakly = self._store.session._weak.weakly
        self.remembered = {what: weakly(execution[what]) for what in _VALUES if what in execution}

    def remember_constants(self) -> None:
        """Keep only the constants of the remembered values: further executions have other values.

        This serves drivers that run the op without opening its context.
        """
        constant = self._known["constant"] or (lambda value: None)
        only = self._store.session._weak.only
        self.remembered = {what: only(v, constant) for what, v in self.remembered.items()}

    # Inside.

    @property
    def _id(self) -> int:
        """The op's id, made when it is first read: many tools read none."""
        if self._number is None:
            site = self._site
            # Without the framework's version: an op has the same id under another version.
            framework, _, rest = site.namespace.partition("/")
            key = site.key if self._forward is None else (self._forward._id, site.key)
            op = (framework, site.same_as or rest.partition("/")[2]), key
            number = stable_id(op)
            ids = self._store.ids if self._key in self._store.contexts else {}
            while ids.setdefault((self._backward, number), op) != op:
                number += 1  # Two keys have one hash: the second takes the next free number.
            self._number = number
        return self._number

    def _note_edits(self, action: Action, changed: Iterable[tuple[int, Any]]) -> None:
        serial = action.tool._amanda.serial
        for position, _ in changed:
            editors = self._edits.setdefault((action.kind, position), set())
            if serial not in editors:
                editors.add(serial)
                self._store.session.contended |= len(editors) > 1

    def _of_op(self, fact: str) -> Any:
        """Return the facts about the forward op, also in the context of its backward op."""
        return (self._forward if self._forward is not None else self)._known[fact]

    def _raw(self) -> Any:
        op = self.execution.get("op", self._known["op"])
        return op() if isinstance(op, weakref.ref) else op

    def _read(self, what: str, *, of_forward: bool) -> Any:
        holder = self._forward if of_forward and self._backward else self
        if holder is None:
            return None
        if holder.execution.get("open"):
            return holder.execution.get(what)
        if self.execution.get("open"):
            return self._store.session._weak.strongly(holder.remembered.get(what))
        raise StaleContextError(
            self.execution.get("closed", f"The {what} of this op are valid only in its routines"),
            where=self.where,
            fix="Let the routine select them, or keep a copy under a key of the context",
        )

    @staticmethod
    def _one_of(first: Any, second: Any, name: str, alias: str) -> Any:
        if first is not None and second is not None:
            raise ActionError(f"Both {name} and {alias} were given", fix=f"Give only {name}")
        return first if first is not None else second

    def _record(
        self,
        kind: ActionKind,
        func: Routine,
        positions: Positions,
        kwargs: Mapping[str, Any],
        observe: bool = False,
        logical: bool = False,
    ) -> None:
        if (
            (recorder := self._recorder) is None
            or not callable(func)
            or (self._backward and not kind.on_backward)
            or (kind.point is not recorder[1] and kind.point.rank < recorder[1].rank)
        ):
            raise refusal(self, kind, func)
        tool, point, log = recorder
        # An observer has no derivative.
        autodiff = self._store.session.control.autodiff and not observe
        if autodiff or kind.on_backward or kind.is_replacement:
            require(self, kind, point, autodiff)
        if kwargs and not POSITION_NAMES.isdisjoint(kwargs):
            refuse_misspelt(self, kind, func, kwargs)
        if logical:
            func = of_logical_values(self, kind, func, observe)
        chosen = None if positions is None else self._check_positions(kind, positions)
        action = Action(kind, func, chosen, kwargs, tool, autodiff, observe)
        self._store.session.recorded(self, action)
        log.append(action)
        edits_inputs = kind in OF_INPUTS and not (observe or self._backward)
        if kwargs and edits_inputs and not self._contains_weights(chosen):
            check_weights(self, action, self._store.session)

    def _contains_weights(self, positions: Sequence[int] | None) -> bool:
        """Return True if the identity of the op contains the weights at these positions.

        The rule of `identity.sites` distinguishes ops by the parameters that they get, so that
        another parameter there would be another op. To find out what else an input shows takes
        longer than all other work at an op's first execution.
        """
        facts, key, inputs = self.facts, self.site.key, self.get_inputs()
        if facts is None or positions is None or inputs is None or not isinstance(key, tuple):
            return False
        return key[:1] == ("op",) and all(facts.is_parameter(inputs[p]) for p in positions)

    def _requested(self) -> str:
        tool, point, _ = cast("tuple[Tool, IPoint, Any]", self._recorder)
        return f"tool {tool.tool_name}, {point.value}, {self.where}"

    def _check_positions(
        self, kind: ActionKind, positions: Sequence[int], step: Step | None = None
    ) -> tuple[int, ...]:
        # Convert it once: an iterator would be empty after the check.
        chosen = tuple(positions) if isinstance(positions, (list, Iterable)) else (None,)
        count = self._count(kind.selects)
        limit = math.inf if count is None else count
        for one in chosen:  # `all` takes longer, and each action asks.
            if type(one) is not int or not 0 <= one < limit:
                break
        else:
            if len(set(chosen)) == len(chosen):
                return chosen
        raise bad_positions(
            self, kind, positions, chosen, count, self._requested() if step is None else step.where
        )

    def _check_aligned_outputs(self, plan: Plan) -> None:
        # It was requested before the op had run, when the number of outputs was unknown.
        for step in (*plan.steps, plan.replacement):
            positions = step.action.positions if step is not None else None
            if step is not None and positions and not step.is_left_out(self._output_count or 0):
                self._check_positions(step.action.kind, positions, step)

    def _count(self, what: str) -> int | None:
        if not self._backward:
            what = what.removeprefix("grad_")
        values = self.execution.get(what)
        return None if values is None else len(values)

    def _make_plans(self) -> dict[IPoint, Plan]:
        found: dict[IPoint, Plan] = {}
        actions = self._store.session.actions_of(self)
        for action in sorted(actions, key=_comes_last) if len(actions) > 1 else actions:
            kind, step = action.kind, Step(action, self)
            plan = found[kind.point] = found.get(kind.point) or Plan()
            if not kind.is_replacement:
                plan.steps += (step,)
            elif plan.replacement is not None:
                self._conflict(kind, plan.replacement.action.tool, action.tool)
            else:
                plan.replacement = step
        return found

    def _refuse_conflict(self, action: Action) -> None:
        """Refuse a second replacement of an op; the core's implementation of the hook."""
        if self._recorder is not None and action.kind.is_replacement:
            # The actions of this tool's earlier analyses at this point are no longer logged.
            tool, _, recorded = self._recorder
            for other in (*self._store.session.actions_of(self), *recorded):
                if other.kind is action.kind:
                    self._conflict(action.kind, other.tool, tool)

    def _conflict(self, kind: ActionKind, first: Tool, second: Tool) -> None:
        raise ReplacementConflictError(
            f"Both {first.tool_name} and {second.tool_name} request {kind.value}",
            where=self.where,
            fix="Apply only one of them, or let one insert before or after the op instead",
        )


def _comes_last(action: Action) -> bool:
    return action.tool.outermost is not (action.kind.point in POINTS[::2])
