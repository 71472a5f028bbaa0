"""Drivers of the toy framework that are wrong in one respect, one for each core test.

Each is the toy driver with a mistake that a real author might make, narrow enough that no other
core test finds it. Most mistakes are in the attachment. The module is long so that all of them can
be compared.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from amanda_core import CoverageGap, IPoint, OpContext, Plan, Session, Site, Tool, hookimpl
from amanda_core.driver_kit.execution import OpRecord
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.toy import driver as toy_driver, framework as toy
from amanda_core.testing.toy.driver import CAPABILITIES, Execution, ToyAttachment, ToyDriver

__all__ = ["BROKEN", "Broken", "Sabotaged", "broken_driver"]

# What is wrong here adds frames to each call; they are the driver's.
toy_driver.OWN.add(__name__)

Values = list[Any]


class View:
    """A session as a wrong attachment sees it, which has methods for what it sees wrongly."""

    def __init__(self, session: Session, attachment: Broken) -> None:
        self.real, self.attachment = session, attachment

    def __getattr__(self, name: str) -> Any:
        wrong = getattr(self.attachment, f"see_{name}", None)
        return getattr(self.real, name) if wrong is None else wrong(self.real)


class BrokenExecution(Execution):
    """An execution of an op whose plans and edits the attachment can make wrong."""

    attachment: Broken

    def analysed(self, context: OpContext, point: IPoint) -> Plan:
        analysed = partial(super().analysed, context, point)
        return self.attachment.plan(analysed, context, point)

    def execute(self, plan: Plan, values: Values) -> Values:
        if not plan.steps:
            return values
        self.attachment.proceed = super().execute
        return self.attachment.edit(plan, values)


class Broken(ToyAttachment):
    """An attachment that is correct until a subclass overrides something.

    Attributes:
        memory: What it remembers, longer than it is attached.
        proceed: Executes a plan rightly.
    """

    execution_type = BrokenExecution
    proceed: Callable[[Plan, Values], Values]

    def __init__(self, driver: Sabotaged, session: Session) -> None:
        self.memory = driver.memory
        super().__init__(driver, session)
        view: Any = View(session, self)
        self.session = view

    def see_open(self, session: Session) -> Callable[..., OpContext]:
        return partial(self.open, session)

    def open(self, session: Session, site: Site, *args: Any, **kwargs: Any) -> OpContext:
        context = session.open(site, *args, **kwargs)
        self.opened(context)
        return context

    def opened(self, context: OpContext) -> None:
        """Do nothing; a wrong attachment overrides this."""

    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        if self.is_overlooked(op, arguments):
            return self.plain(op, arguments)
        return super().dispatch(op, arguments)

    def plain(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        return tuple(self.vanilla["dispatch"](op, arguments))

    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return False

    def plan(self, analysed: Callable[[], Plan], *where: Any) -> Plan:
        return analysed()

    def edit(self, plan: Plan, values: Values) -> Values:
        if plan.steps[0].action.kind.point is IPoint.AFTER_FORWARD:
            return self.edit_outputs(plan, values)
        return self.edit_inputs(plan, values)

    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        return self.proceed(plan, values)

    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        return self.proceed(plan, values)

    def records_of(self, op: toy.Op) -> list[OpRecord]:
        return [record for record in self.records.values() if record.site.op_type == op.name]

    def forget(self) -> None:
        for context in self.session.contexts():
            self.session.forget(context)
        self.records.clear()


class Sabotaged(ToyDriver):
    """The toy driver, correct until a subclass overrides something, with such an attachment."""

    declared: ClassVar[Mapping[str, Any]] = {}

    def __init__(self, attachment_type: type[Broken] = Broken) -> None:
        super().__init__()
        self.info = dataclasses.replace(self.info, **self.declared)
        self.attachment_type = attachment_type
        self.memory: dict[Any, Any] = {}


def broken_driver(wrong: type[Broken] | type[Sabotaged]) -> Sabotaged:
    """Return a driver that makes one mistake."""
    return wrong() if issubclass(wrong, Sabotaged) else Sabotaged(wrong)


# Identity.


class MissesOperatorsInModules(Broken):
    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return bool(toy.scope_path())


class SkipsLaterRoundsOfALoop(Broken):
    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        # Where each value came from. The values are kept, or a later one could get their id.
        here = toy_driver.call_site()[:2]
        places = {here}.union(*(self.memory.get(id(a), ((), None))[0] for a in arguments))
        is_later = any(here in self.memory.get(id(a), ((), None))[0] for a in arguments)
        outputs = (self.plain if is_later else super().dispatch)(op, arguments)
        self.memory.update((id(output), (places, output)) for output in outputs)
        return outputs


class NumbersExecutionsWithoutTheCache(Broken):
    def site_key(self, op: toy.Op) -> tuple[Any, ...]:
        self.memory["count"] = self.memory.get("count", 0) + 1
        return (*super().site_key(op), 0 if self.session.caching else self.memory["count"])


class TellsOpsApartByNameOnly(Broken):
    def site_key(self, op: toy.Op) -> tuple[Any, ...]:
        return super().site_key(op)[:2]


class SeesTheFirstReaderOnly(Broken):
    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        made = [value for value in arguments if value.edge and not value.is_parameter]
        # The values are kept, or a later one could get the id of an earlier one.
        read = any(id(value) in self.memory for value in made)
        self.memory.update((id(value), value) for value in made)
        return read


class RoundsWhatIsWatched(Broken):
    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        outputs = super().dispatch(op, arguments)
        if all(record.is_idle(self.session) for record in self.records_of(op)):
            for output in outputs:
                output.data *= 1 + 1e-15
        return outputs


class RoundsWhatRoutinesReturn(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        edited = self.proceed(plan, values)
        return [toy.Value(v.data * (1 + 1e-15), v.edge, name=v.name) for v in edited]


# Edits.


class EditsInputsOnTheFirstRunOnly(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        edited = self.proceed(plan, values)
        is_first = self.memory.setdefault(id(plan), (plan, values))[1] is values
        return edited if is_first else values


class EditsOnlyWhatOtherOpsRead(Broken):
    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        edited = self.proceed(plan, values)
        # The last op of all models that are edited here.
        return values if plan.steps[0]._context.op_type == "relu" else edited


class LooksForOutputEditsOnlyBehindTheOp(Broken):
    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        def looks_behind(tool: Tool) -> bool:
            return bool(tool._amanda.routines[IPoint.AFTER_FORWARD])

        if any(looks_behind(step.action.tool) for step in plan):
            plan = Plan([step for step in plan if looks_behind(step.action.tool)])
        return self.proceed(plan, values)


class ComputesOutputsOnTheOldInputs(Broken):
    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        self.memory["plain"] = partial(self.plain, op, arguments)
        return super().dispatch(op, arguments)

    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        shown = list(self.memory["plain"]())
        edited = self.proceed(plan, shown)
        return [v if e is s else e for v, s, e in zip(values, shown, edited, strict=True)]


class SortsPositions(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        for step in plan:
            asked = step.action.positions or ()
            turn = -1 if list(asked) != sorted(asked) else 1
            values = self.proceed(Plan([step]), values[::turn])[::turn]
        return values


class GivesTheFirstInputOnly(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        for step in plan:
            given = 1 if step.action.positions is None else len(values)
            values = [*self.proceed(Plan([step]), values[:given]), *values[given:]]
        return values


class EditsInPlace(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        edited = self.proceed(plan, values)
        for old, new in zip(values, edited, strict=True):
            if self.is_written(old):
                old.data = new.data
        return edited

    def is_written(self, value: toy.Value) -> bool:
        return not value.is_parameter


class EditsParametersInPlace(EditsInPlace):
    def is_written(self, value: toy.Value) -> bool:
        return value.is_parameter


class RunsEachRoutineOnTheOriginal(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        return [self.proceed(Plan([step]), values) for step in plan][-1]


class RunsDependenciesLast(Broken):
    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        steps = sorted(plan, key=lambda step: not step.action.tool._amanda.dependencies)
        return self.proceed(Plan(steps), values)


class RemembersWhatRoutinesMade(Broken):
    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        made: Values = self.memory.get(plan) or self.proceed(plan, values)
        self.memory[plan] = made
        return made


class SwallowsWrongResults(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        try:
            return self.proceed(plan, values)
        except RoutineResultError:
            return values


class SwallowsWrongPositions(Broken):
    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        try:
            return super().dispatch(op, arguments)
        except PositionError:
            return self.plain(op, arguments)


# Analysis.


class HasACacheOfSevenExecutions(Broken):
    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        outputs = super().dispatch(op, arguments)
        self.memory["count"] = self.memory.get("count", 0) + self.session.caching
        if self.memory["count"] == 7:
            self.forget()
        return outputs


class AlwaysCaches(Broken):
    def see_caching(self, session: Session) -> bool:
        return True


class AsksForTheCacheOnce(Broken):
    def __init__(self, driver: Sabotaged, session: Session) -> None:
        super().__init__(driver, session)
        self.was_caching = session.caching

    def dispatch(self, op: toy.Op, arguments: Values) -> tuple[Any, ...]:
        outputs = super().dispatch(op, arguments)
        if not self.was_caching:
            self.forget()
        return outputs


class KeepsPlansWithoutTheCache(Broken):
    def edit_outputs(self, plan: Plan, values: Values) -> Values:
        if not self.session.caching:
            plan = self.memory.setdefault(plan.steps[0]._context, plan)
        return self.proceed(plan, values)


class CachesPlans(Broken):
    """Is correct, too: for mistakes of drivers that keep plans as long as the epoch they see."""

    def plan(self, analysed: Callable[[], Plan], *where: Any) -> Plan:
        plan: Plan | None
        epoch, plan = self.memory.get(where, (0, None))
        if plan is None or epoch != self.session.epoch or not self.session.caching:
            plan = analysed()
            self.memory[where] = self.session.epoch, plan
        return plan


class WatchesRegistrationsOnly(CachesPlans):
    def see_epoch(self, session: Session) -> int:
        tools = tuple(
            (tool._amanda.serial, *map(len, tool._amanda.routines.values()))
            for tool in session.tools
        )
        number: int = self.memory.setdefault(tools, len(self.memory) + 1)
        return number


class NeverLooksAgainWhereNothingWasAsked(Broken):
    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        session, memory = self.session, self.memory
        if not session.caching or memory.setdefault("tools", session.tools) != session.tools:
            return False
        known = self.records_of(op)
        return bool(known) and all(record in memory for record in known)

    def execute(self, record: OpRecord, *called: Any) -> tuple[Any, ...]:
        outputs = super().execute(record, *called)
        if record.is_idle(self.session):
            self.memory[record] = True
        return outputs


class StartsAnew(Broken):
    def __init__(self, driver: Sabotaged, session: Session) -> None:
        super().__init__(driver, session)
        self.forget()


class FillsOutputsEarly(Broken):
    def opened(self, context: OpContext) -> None:
        context.fill(outputs=[toy.Value(0.0)])


# Control.


class IgnoresDisabledOnceItHasBegun(Broken):
    def see_enabled(self, session: Session) -> bool:
        if session.enabled:
            self.memory["begun"] = True
        return "begun" in self.memory and not session.closed and not THREAD.control.routine_depth


class GivesUpOnOpsThatRanDisabledFirst(Broken):
    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return not self.memory.setdefault(op.name, self.session.enabled)


class KeepsNestedToolsThatWereLeft(CachesPlans):
    def see_epoch(self, session: Session) -> int:
        most: tuple[Tool, ...] = self.memory.get("tools", ())
        if session.tools == most or session.tools != most[: len(session.tools)]:
            self.memory.update(tools=session.tools, epoch=session.epoch)
        epoch: int = self.memory["epoch"]
        return epoch


class LooksAtTheNewestToolOnly(CachesPlans):
    def see_epoch(self, session: Session) -> int:
        newest = session.tools[-1]._amanda
        key = newest.serial, newest.generation
        number: int = self.memory.setdefault(key, len(self.memory) + 1)
        return number


class AttachesOnce(Sabotaged):
    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        first: ToyAttachment | None = self.memory.get("first")
        if first is None or first.session.tools == session.tools:
            self.memory["first"] = attachment = super().amanda_attach(session)
            return attachment
        # For other tools than the first: no new attachment.
        self.interception.attach(first)
        return first


class OverlooksNewModels(Broken):
    def __init__(self, driver: Sabotaged, session: Session) -> None:
        super().__init__(driver, session)
        self.parameter = vanilla = toy.parameter
        toy.parameter = lambda data, name="": vanilla(data, "new")

    def detach(self) -> None:
        toy.parameter = self.parameter
        super().detach()

    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return any(value.name == "new" for value in arguments)


class InstrumentsRoutines(Broken):
    def see_enabled(self, session: Session) -> bool:
        return session.control.enabled and not session.closed


class InstrumentsAllThreads(Sabotaged):
    class Everywhere(Broken):
        def see_enabled(self, session: Session) -> bool:
            here = threading.current_thread() is threading.main_thread()
            return session.enabled if here else session.control.enabled

    class Attached(dict[object, Any]):
        def get(self, thread: object, default: Any = None) -> Any:
            return next(iter(self.values()), default)

    def __init__(self) -> None:
        super().__init__(self.Everywhere)
        self.interception.attached = self.Attached()


# Exceptions.


class DropsTheNotes(Broken):
    def edit_inputs(self, plan: Plan, values: Values) -> Values:
        try:
            return self.proceed(plan, values)
        except Exception as error:
            vars(error).pop("__notes__", None)
            raise


class RemembersExceptions(Broken):
    """Is correct, too: for mistakes that only come after an exception."""

    def edit(self, plan: Plan, values: Values) -> Values:
        try:
            return super().edit(plan, values)
        except Exception:
            self.memory["over"] = True
            raise


class EndsWithTheFirstException(RemembersExceptions):
    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return "over" in self.memory


class CachesFailedAnalyses(Broken):
    def execute(self, record: OpRecord, *called: Any) -> tuple[Any, ...]:
        is_first = self.memory.setdefault(record, called) is called
        try:
            return super().execute(record, *called)
        except Exception:
            record.note(self.session, self.session.epoch, acts=not is_first)
            raise


class StaysAfterAnException(RemembersExceptions):
    def detach(self) -> None:
        if "over" not in self.memory:
            super().detach()


class RestoresAfterErrorsOnly(Broken):
    def execute(self, record: OpRecord, *called: Any) -> tuple[Any, ...]:
        self.memory["inside"] = True
        try:
            outputs = super().execute(record, *called)
        except Exception:
            self.memory["inside"] = False
            raise
        self.memory["inside"] = False
        return outputs

    def is_overlooked(self, op: toy.Op, arguments: Values) -> bool:
        return bool(self.memory.get("inside"))


# Contexts.


class NamesNothing(Broken):
    def open(self, session: Session, site: Site, *args: Any, **kwargs: Any) -> OpContext:
        return super().open(session, dataclasses.replace(site, name=""), *args, **kwargs)


class HasAModeOfItsOwn(Broken):
    def open(self, session: Session, site: Site, *args: Any, **kwargs: Any) -> OpContext:
        site = dataclasses.replace(site, namespace="toy/1.2.3/lazy")
        return super().open(session, site, *args, **kwargs)


class HasWordsOfItsOwn(Sabotaged):
    declared: ClassVar[Mapping[str, Any]] = {"vocabulary": {"total": "grand_total"}}


class ClearsKeys(Broken):
    def opened(self, context: OpContext) -> None:
        for key in [key for key in context if key not in ("type", "backward_type")]:
            del context[key]


class NeverReleases(Broken):
    def opened(self, context: OpContext) -> None:
        context.release = lambda: None  # type: ignore[method-assign]


class KnowsNoParameters(Broken):
    def open(self, *args: Any, **kwargs: Any) -> OpContext:
        return super().open(*args, **{**kwargs, "constant": lambda value: None})


class ClaimsWhatNobodyKnows(Sabotaged):
    declared: ClassVar[Mapping[str, Any]] = {"capabilities": CAPABILITIES | {"telepathy"}}


class GivesNoReasons(Broken):
    def coverage(self) -> Sequence[CoverageGap]:
        return [CoverageGap(gap.what, "") for gap in super().coverage()]


class LeavesAFunctionBehind(RemembersExceptions):
    def detach(self) -> None:
        super().detach()
        if "over" not in self.memory:
            toy.dispatch = partial(toy.dispatch)


#: Core test -> the driver that it must not let pass.
BROKEN: Mapping[str, type[Broken] | type[Sabotaged]] = {
    "test_each_op_is_seen_once_and_in_order": MissesOperatorsInModules,
    "test_a_loop_executes_its_ops_each_time": SkipsLaterRoundsOfALoop,
    "test_ids_stay_the_same_from_run_to_run": NumbersExecutionsWithoutTheCache,
    "test_two_equal_ops_have_two_ids": TellsOpsApartByNameOnly,
    "test_readers_of_one_value_are_seen": SeesTheFirstReaderOnly,
    "test_watching_changes_nothing": RoundsWhatIsWatched,
    "test_routines_that_return_none_or_what_they_got_change_nothing": RoundsWhatRoutinesReturn,
    "test_an_input_is_edited": EditsInputsOnTheFirstRunOnly,
    "test_an_output_is_edited": EditsOnlyWhatOtherOpsRead,
    "test_an_output_edit_asked_for_before_the_op": LooksForOutputEditsOnlyBehindTheOp,
    "test_an_output_is_the_value_that_the_op_computed": ComputesOutputsOnTheOldInputs,
    "test_a_routine_gets_the_positions_that_it_asked_for": SortsPositions,
    "test_without_positions_a_routine_gets_all_inputs": GivesTheFirstInputOnly,
    "test_an_edit_is_of_one_op_only": EditsInPlace,
    "test_an_edited_parameter_stays_what_it_was": EditsParametersInPlace,
    "test_several_routines_run_in_order_each_on_what_the_last_one_made": (
        RunsEachRoutineOnTheOriginal
    ),
    "test_a_dependency_runs_first": RunsDependenciesLast,
    "test_keyword_arguments_come_by_reference": RemembersWhatRoutinesMade,
    "test_a_wrong_number_of_results_is_an_error": SwallowsWrongResults,
    "test_a_position_that_does_not_exist_is_an_error": SwallowsWrongPositions,
    "test_analysis_runs_once_an_op": HasACacheOfSevenExecutions,
    "test_analysis_runs_each_time_without_the_cache": AlwaysCaches,
    "test_the_cache_can_be_enabled_again": AsksForTheCacheOnce,
    "test_what_analysis_asked_for_is_forgotten_without_the_cache": KeepsPlansWithoutTheCache,
    "test_an_invalidated_tool_is_asked_again": WatchesRegistrationsOnly,
    "test_a_routine_registered_later_runs": NeverLooksAgainWhereNothingWasAsked,
    "test_tools_applied_again_resume": StartsAnew,
    "test_inputs_before_and_outputs_behind": FillsOutputsEarly,
    "test_disabled_and_enabled": IgnoresDisabledOnceItHasBegun,
    "test_disabled_from_the_beginning": GivesUpOnOpsThatRanDisabledFirst,
    "test_a_nested_tool_runs_after_the_outer_one_and_only_inside": KeepsNestedToolsThatWereLeft,
    "test_a_handle_is_removed_once": LooksAtTheNewestToolOnly,
    "test_tools_are_applied_one_after_the_other": AttachesOnce,
    "test_a_model_built_while_tools_are_applied": OverlooksNewModels,
    "test_operators_inside_a_routine_are_not_instrumented": InstrumentsRoutines,
    "test_other_threads_run_as_without_tools": InstrumentsAllThreads,
    "test_an_exception_of_a_routine_keeps_its_type_and_says_where": DropsTheNotes,
    "test_a_session_survives_an_exception_of_a_routine": EndsWithTheFirstException,
    "test_a_failed_analysis_is_not_taken_for_a_done_one": CachesFailedAnalyses,
    "test_an_exception_that_leaves_apply_takes_the_tools_along": StaysAfterAnException,
    "test_facts_of_an_op": NamesNothing,
    "test_the_namespace_is_a_declared_one": HasAModeOfItsOwn,
    "test_operators_have_common_words": HasWordsOfItsOwn,
    "test_keys_persist": ClearsKeys,
    "test_values_are_not_kept": NeverReleases,
    "test_the_value_of_a_parameter_is_known_in_analysis": KnowsNoParameters,
    "test_the_driver_describes_itself": ClaimsWhatNobodyKnows,
    "test_blind_spots_are_reported": GivesNoReasons,
    "test_everything_is_restored": LeavesAFunctionBehind,
}
