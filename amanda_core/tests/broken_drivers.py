"""Drivers of the toy framework that are wrong in one respect, one for each core test.

Each is the toy driver with a mistake that a real author might make, narrow enough that no other
core test finds it. The module is long so that all of them can be compared.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from amanda_core import CoverageGap, IPoint, OpContext, Plan, Session, Tool, hookimpl
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.testing import toy, toy_driver
from amanda_core.testing.toy_driver import CAPABILITIES, Planned, ToyAttachment, ToyDriver
from amanda_core.threads import THREAD

__all__ = ["BROKEN", "Sabotaged"]

# What is wrong here adds frames to each call; they are the driver's.
toy_driver.OWN.add(__name__)

Outputs = tuple[toy.Value, ...]


class View:
    """A session as a wrong driver sees it."""

    def __init__(self, session: Session, driver: Sabotaged) -> None:
        self.real, self.driver = session, driver

    def __getattr__(self, name: str) -> Any:
        return getattr(self.real, name)

    @property
    def enabled(self) -> bool:
        """Return True if ops must be instrumented."""
        return self.driver.is_enabled(self.real)

    @property
    def caching(self) -> bool:
        """Return True if analysis runs once for each op."""
        return self.driver.is_caching(self.real)

    @property
    def epoch(self) -> int:
        """Return the epoch for which plans hold."""
        return self.driver.epoch_of(self.real)

    def open(self, site: Any, *args: Any, **kwargs: Any) -> OpContext:
        """Open a context."""
        return self.driver.open(self.real, site, *args, **kwargs)


class SabotagedAttachment(ToyAttachment):
    """An attachment each part of which its driver can make wrong."""

    driver: Sabotaged

    def __init__(self, driver: Sabotaged, session: Session) -> None:
        super().__init__(driver, session)
        view: Any = View(session, driver)
        self.session = view

    def detach(self) -> None:
        self.driver.detach(self, super().detach)

    def coverage(self) -> Sequence[CoverageGap]:
        return self.driver.coverage(super().coverage())

    def dispatch(self, op: toy.Op, arguments: list[Any]) -> Outputs:
        return self.driver.dispatch(self, super().dispatch, op, arguments)

    def vanilla_dispatch(self, op: toy.Op, arguments: list[Any]) -> Outputs:
        return self._original(op, arguments)

    def _analyse(self, op: toy.Op, arguments: list[Any], key: Any) -> Outputs:
        return self.driver.analyse(self, super()._analyse, op, arguments, key)

    def _fold(self, plan: Plan, values: Sequence[Any]) -> list[Any]:
        if not plan.steps:
            return list(values)
        return self.driver.fold(super()._fold, plan, list(values))


class Sabotaged(ToyDriver):
    """The toy driver, correct until a subclass overrides something."""

    capabilities: ClassVar[frozenset[str]] = CAPABILITIES

    def __init__(self) -> None:
        super().__init__(capabilities=self.capabilities)
        self.memory: dict[Any, Any] = {}

    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        self.before_attach(session)
        if not self.attachments:
            self._replace()
        attachment = SabotagedAttachment(self, session)
        self.attachments[attachment.thread] = attachment
        return attachment

    # What subclasses override.

    def before_attach(self, session: Session) -> None:
        """Do nothing; a wrong driver overrides this."""

    def is_enabled(self, session: Session) -> bool:
        return session.enabled

    def is_caching(self, session: Session) -> bool:
        return session.caching

    def epoch_of(self, session: Session) -> int:
        return session.epoch

    def open(self, session: Session, site: Any, *args: Any, **kwargs: Any) -> OpContext:
        return session.open(self.site(site), *args, **kwargs)

    def site(self, site: Any) -> Any:
        return site

    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        proceed()

    def coverage(self, found: Sequence[CoverageGap]) -> Sequence[CoverageGap]:
        return found

    def dispatch(
        self,
        attachment: SabotagedAttachment,
        proceed: Callable[..., Outputs],
        op: toy.Op,
        arguments: list[Any],
    ) -> Outputs:
        if self.is_overlooked(attachment, op, arguments):
            return attachment.vanilla_dispatch(op, arguments)
        return proceed(op, arguments)

    def is_overlooked(
        self, attachment: SabotagedAttachment, op: toy.Op, arguments: list[Any]
    ) -> bool:
        return False

    def analyse(
        self,
        attachment: SabotagedAttachment,
        proceed: Callable[..., Outputs],
        op: toy.Op,
        arguments: list[Any],
        key: Any,
    ) -> Outputs:
        return proceed(op, arguments, self.key(key))

    def key(self, key: Any) -> Any:
        return key

    def fold(self, proceed: Callable[..., list[Any]], plan: Plan, values: list[Any]) -> list[Any]:
        if plan.steps[0].action.kind.point is IPoint.AFTER_FORWARD:
            return self.fold_after(proceed, plan, values)
        return self.fold_before(proceed, plan, values)

    def fold_before(
        self, proceed: Callable[..., list[Any]], plan: Plan, values: list[Any]
    ) -> list[Any]:
        return proceed(plan, values)

    def fold_after(
        self, proceed: Callable[..., list[Any]], plan: Plan, values: list[Any]
    ) -> list[Any]:
        return proceed(plan, values)


def is_parameter(value: toy.Value) -> bool:
    return value.edge is not None and value.edge[0].name == "AccumulateGrad"


def plans_of(attachment: SabotagedAttachment, op: toy.Op) -> list[Planned]:
    return [plan for plan in attachment.planned.values() if plan.context.op_type == op.name]


def forget(attachment: SabotagedAttachment) -> None:
    for context in attachment.session.contexts():
        attachment.session.forget(context)
    attachment.planned.clear()


# Identity.


class MissesOperatorsInModules(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return bool(toy.scope_path())


class SkipsLaterRoundsOfALoop(Sabotaged):
    def dispatch(self, attachment: Any, proceed: Any, op: toy.Op, arguments: Any) -> Outputs:
        # Where each value came from. The values are kept, or a later one could get their id.
        here = toy_driver._call_site()[:2]
        places = {here}.union(*(self.memory.get(id(a), ((), None))[0] for a in arguments))
        if any(here in self.memory.get(id(a), ((), None))[0] for a in arguments):
            outputs: Outputs = attachment.vanilla_dispatch(op, arguments)
        else:
            outputs = proceed(op, arguments)
        self.memory.update((id(output), (places, output)) for output in outputs)
        return outputs


class NumbersExecutionsWithoutTheCache(Sabotaged):
    def analyse(
        self, attachment: SabotagedAttachment, proceed: Any, op: toy.Op, arguments: Any, key: Any
    ) -> Outputs:
        if not attachment.session.caching:
            self.memory["count"] = self.memory.get("count", 0) + 1
            key = (*key[:3], -self.memory["count"], key[4])
        outputs: Outputs = proceed(op, arguments, key)
        return outputs


class TellsOpsApartByNameOnly(Sabotaged):
    def key(self, key: Any) -> Any:
        path, name, _, _, line = key
        return path, name, "", 0, line


class SeesTheFirstReaderOnly(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: list[Any]) -> bool:
        made = [value for value in arguments if value.edge and not is_parameter(value)]
        # The values are kept, or a later one could get the id of an earlier one.
        read = any(id(value) in self.memory for value in made)
        self.memory.update((id(value), value) for value in made)
        return read


class RoundsWhatIsWatched(Sabotaged):
    def dispatch(self, attachment: Any, proceed: Any, op: toy.Op, arguments: Any) -> Outputs:
        outputs = super().dispatch(attachment, proceed, op, arguments)
        if all(plan.is_empty for plan in plans_of(attachment, op)):
            for output in outputs:
                output.data *= 1 + 1e-15
        return outputs


class RoundsWhatRoutinesReturn(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        return [toy.Value(v.data * (1 + 1e-15), v.edge, name=v.name) for v in folded]


# Edits.


class EditsInputsOnTheFirstRunOnly(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        is_first = self.memory.setdefault(id(plan), (plan, values))[1] is values
        return folded if is_first else values


class EditsOnlyWhatOtherOpsRead(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        # The last op of all models that are edited here.
        return values if plan.steps[0]._context.op_type == "relu" else folded


class LooksForOutputEditsOnlyBehindTheOp(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        def looks_behind(tool: Tool) -> bool:
            return bool(tool._amanda.routines[IPoint.AFTER_FORWARD])

        if any(looks_behind(step.action.tool) for step in plan):
            plan = Plan([step for step in plan if looks_behind(step.action.tool)])
        folded: list[Any] = proceed(plan, values)
        return folded


class ComputesOutputsOnTheOldInputs(Sabotaged):
    def dispatch(self, attachment: Any, proceed: Any, op: toy.Op, arguments: Any) -> Outputs:
        self.memory["vanilla"] = lambda: attachment.vanilla_dispatch(op, arguments)
        return super().dispatch(attachment, proceed, op, arguments)

    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        shown = list(self.memory["vanilla"]())
        folded = proceed(plan, shown)
        return [v if f is s else f for v, s, f in zip(values, shown, folded, strict=True)]


class SortsPositions(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        for step in plan:
            asked = step.action.positions or ()
            turn = -1 if list(asked) != sorted(asked) else 1
            values = proceed(Plan([step]), values[::turn])[::turn]
        return values


class GivesTheFirstInputOnly(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        for step in plan:
            given = 1 if step.action.positions is None else len(values)
            values = [*proceed(Plan([step]), values[:given]), *values[given:]]
        return values


class EditsInPlace(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        for old, new in zip(values, folded, strict=True):
            if not is_parameter(old):
                old.data = new.data
        return folded


class EditsParametersInPlace(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        for old, new in zip(values, folded, strict=True):
            if is_parameter(old):
                old.data = new.data
        return folded


class RunsEachRoutineOnTheOriginal(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded = values
        for step in plan:
            folded = proceed(Plan([step]), values)
        return folded


class RunsDependenciesLast(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        steps = sorted(plan, key=lambda step: not step.action.tool._amanda.dependencies)
        folded: list[Any] = proceed(Plan(steps), values)
        return folded


class RemembersWhatRoutinesMade(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        if plan not in self.memory:
            self.memory[plan] = proceed(plan, values)
        made: list[Any] = self.memory[plan]
        return made


class SwallowsWrongResults(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        try:
            folded: list[Any] = proceed(plan, values)
        except RoutineResultError:
            return values
        return folded


class SwallowsWrongPositions(Sabotaged):
    def dispatch(self, attachment: Any, proceed: Any, op: toy.Op, arguments: Any) -> Outputs:
        try:
            outputs: Outputs = proceed(op, arguments)
        except PositionError:
            outputs = attachment.vanilla_dispatch(op, arguments)
        return outputs


# Analysis.


class HasACacheOfSevenExecutions(Sabotaged):
    def dispatch(self, attachment: SabotagedAttachment, *args: Any) -> Outputs:
        outputs = super().dispatch(attachment, *args)
        self.memory["count"] = self.memory.get("count", 0) + attachment.session.caching
        if self.memory["count"] == 7:
            forget(attachment)
        return outputs


class AlwaysCaches(Sabotaged):
    def is_caching(self, session: Session) -> bool:
        return True


class AsksForTheCacheOnce(Sabotaged):
    def before_attach(self, session: Session) -> None:
        self.memory["caching"] = session.caching

    def dispatch(self, attachment: SabotagedAttachment, *args: Any) -> Outputs:
        outputs = super().dispatch(attachment, *args)
        if not self.memory["caching"]:
            forget(attachment)
        return outputs


class KeepsPlansWithoutTheCache(Sabotaged):
    def dispatch(self, attachment: SabotagedAttachment, *args: Any) -> Outputs:
        self.memory["caching"] = attachment.session.caching
        return super().dispatch(attachment, *args)

    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        if not self.memory["caching"]:
            plan = self.memory.setdefault(plan.steps[0]._context, plan)
        folded: list[Any] = proceed(plan, values)
        return folded


class WatchesRegistrationsOnly(Sabotaged):
    def epoch_of(self, session: Session) -> int:
        tools = tuple(
            (tool._amanda.serial, *map(len, tool._amanda.routines.values()))
            for tool in session.tools
        )
        number: int = self.memory.setdefault(tools, len(self.memory))
        return number


class NeverLooksAgainWhereNothingWasAsked(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        session = attachment.session
        if not session.caching or self.memory.setdefault("tools", session.tools) != session.tools:
            return False
        planned = plans_of(attachment, op)
        return bool(planned) and all(plan.is_empty for plan in planned)


class StartsAnew(Sabotaged):
    def before_attach(self, session: Session) -> None:
        session.persistent("toy.planned", dict).clear()
        for context in session.contexts():
            session.forget(context)


class FillsOutputsEarly(Sabotaged):
    def open(self, *args: Any, **kwargs: Any) -> OpContext:
        context = super().open(*args, **kwargs)
        context.fill(outputs=[toy.Value(0.0)])
        return context


# Control.


class IgnoresDisabledOnceItHasBegun(Sabotaged):
    def is_enabled(self, session: Session) -> bool:
        if session.enabled:
            self.memory["begun"] = True
        return "begun" in self.memory and not session.closed and not THREAD.control.routine_depth


class GivesUpOnOpsThatRanDisabledFirst(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return not self.memory.setdefault(op.name, attachment.session.enabled)


class KeepsNestedToolsThatWereLeft(Sabotaged):
    def epoch_of(self, session: Session) -> int:
        most: tuple[Tool, ...] = self.memory.get("tools", ())
        if session.tools == most or session.tools != most[: len(session.tools)]:
            self.memory.update(tools=session.tools, epoch=session.epoch)
        epoch: int = self.memory["epoch"]
        return epoch


class LooksAtTheNewestToolOnly(Sabotaged):
    def epoch_of(self, session: Session) -> int:
        newest = session.tools[-1]._amanda
        number: int = self.memory.setdefault((newest.serial, newest.generation), len(self.memory))
        return number


class AttachesOnce(Sabotaged):
    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        first: ToyAttachment | None = self.memory.get("first")
        if first is None or first.session.tools == session.tools:
            self.memory["first"] = attachment = super().amanda_attach(session)
            return attachment
        # For other tools than the first: no new attachment.
        self._replace()
        self.attachments[first.thread] = first
        return first


class OverlooksNewModels(Sabotaged):
    def before_attach(self, session: Session) -> None:
        self.memory["parameter"] = vanilla = toy.parameter
        toy.parameter = lambda data, name="": vanilla(data, "new")

    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        toy.parameter = self.memory["parameter"]
        proceed()

    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return any(value.name == "new" for value in arguments)


class InstrumentsRoutines(Sabotaged):
    def is_enabled(self, session: Session) -> bool:
        return session.control.enabled and not session.closed


class InstrumentsAllThreads(Sabotaged):
    def _routed(self, name: str) -> Callable[..., Any]:
        def replacement(*args: Any, **kwargs: Any) -> Any:
            attachment = next(iter(self.attachments.values()))
            return getattr(attachment, name)(*args, **kwargs)

        return replacement

    def is_enabled(self, session: Session) -> bool:
        here = threading.current_thread() is threading.main_thread()
        return session.enabled if here else session.control.enabled


# Exceptions.


class DropsTheNotes(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        try:
            folded: list[Any] = proceed(plan, values)
        except Exception as error:
            vars(error).pop("__notes__", None)
            raise
        return folded


class EndsWithTheFirstException(Sabotaged):
    def fold(self, *args: Any) -> list[Any]:
        try:
            return super().fold(*args)
        except Exception:
            self.memory["over"] = True
            raise

    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return "over" in self.memory


class CachesFailedAnalyses(Sabotaged):
    def analyse(
        self, attachment: SabotagedAttachment, proceed: Any, op: toy.Op, arguments: Any, key: Any
    ) -> Outputs:
        try:
            outputs: Outputs = proceed(op, arguments, key)
        except Exception:
            nothing: Any = Plan()
            context: Any = None
            epoch = attachment.session.epoch
            attachment.planned[key] = Planned(epoch, context, nothing, nothing, nothing, nothing)
            raise
        return outputs


class StaysAfterAnException(EndsWithTheFirstException):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return False

    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        if "over" not in self.memory:
            proceed()


# Contexts.


class NamesNothing(Sabotaged):
    def site(self, site: Any) -> Any:
        return dataclasses.replace(site, name="")


class HasAModeOfItsOwn(Sabotaged):
    def site(self, site: Any) -> Any:
        return dataclasses.replace(site, namespace="toy/1.2.3/lazy")


class HasWordsOfItsOwn(Sabotaged):
    def __init__(self) -> None:
        super().__init__()
        words = {**self.info.vocabulary, "total": "grand_total"}
        self.info = dataclasses.replace(self.info, vocabulary=words)


class ClearsKeys(Sabotaged):
    def open(self, *args: Any, **kwargs: Any) -> OpContext:
        context = super().open(*args, **kwargs)
        for key in [key for key in context if key not in ("type", "backward_type")]:
            del context[key]
        return context


class NeverReleases(Sabotaged):
    def open(self, *args: Any, **kwargs: Any) -> OpContext:
        context = super().open(*args, **kwargs)
        context.release = lambda: None  # type: ignore[method-assign]
        return context


class KnowsNoParameters(Sabotaged):
    def open(self, session: Session, site: Any, *args: Any, **kwargs: Any) -> OpContext:
        return super().open(session, site, *args, **{**kwargs, "constant": lambda value: None})


class ClaimsWhatNobodyKnows(Sabotaged):
    capabilities: ClassVar[frozenset[str]] = CAPABILITIES | {"telepathy"}


class GivesNoReasons(Sabotaged):
    def coverage(self, found: Sequence[CoverageGap]) -> Sequence[CoverageGap]:
        return [CoverageGap(gap.what, "") for gap in found]


class LeavesAFunctionBehind(EndsWithTheFirstException):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return False

    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        proceed()
        if "over" not in self.memory:
            vanilla = toy.dispatch
            toy.dispatch = lambda op, arguments: vanilla(op, arguments)


#: Core test -> the driver that it must not let pass.
BROKEN: Mapping[str, type[Sabotaged]] = {
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
