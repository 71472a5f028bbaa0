"""Drivers of the toy framework that are wrong in one respect each, one for each core test.

Each is made of the whole toy driver and a few lines that a real author might get wrong. Somewhat
long, so that all of them can be read side by side.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

from amanda_core import Blind, IPoint, OpContext, Plan, Session, hookimpl
from amanda_core.errors import PositionError, RoutineResultError
from amanda_core.threads import THREAD

from . import toy, toy_driver
from .conformance_backend import CAPABILITIES
from .toy_driver import Planned, ToyAttachment, ToyDriver

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
        """Whether ops are to be instrumented."""
        return self.driver.is_enabled(self.real)

    @property
    def caching(self) -> bool:
        """Whether analysis runs once an op."""
        return self.driver.is_caching(self.real)

    @property
    def epoch(self) -> int:
        """For how long plans hold."""
        return self.driver.epoch_of(self.real)

    def open(self, site: Any, *args: Any, **kwargs: Any) -> OpContext:
        """Open a context."""
        return self.driver.open(self.real, site, *args, **kwargs)


class SabotagedAttachment(ToyAttachment):
    """An attachment whose every part can be made wrong by its driver."""

    driver: Sabotaged

    def __init__(self, driver: Sabotaged, session: Session) -> None:
        super().__init__(driver, session)
        view: Any = View(session, driver)
        self.session = view

    def detach(self) -> None:
        self.driver.detach(self, super().detach)

    def coverage(self) -> Sequence[Blind]:
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
    """The toy driver, right as long as nothing is overridden."""

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

    # What may be made wrong.

    def before_attach(self, session: Session) -> None:
        """Nothing to do."""

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

    def coverage(self, found: Sequence[Blind]) -> Sequence[Blind]:
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


# Identity.


class MissesAnOperator(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        return op.name == "relu"


class SkipsTheSecondRoundOfALoop(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        self.memory[op.name] = self.memory.get(op.name, 0) + 1
        return bool(self.memory[op.name] == 2)


class NumbersExecutions(Sabotaged):
    def key(self, key: Any) -> Any:
        self.memory["count"] = self.memory.get("count", 0) + 1
        return (key, self.memory["count"])


class TellsOpsApartByNameOnly(Sabotaged):
    def key(self, key: Any) -> Any:
        return key[1]


class SeesTheFirstReaderOnly(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: list[Any]) -> bool:
        # The values are kept, so that no later one gets the number of an earlier one.
        read = any(id(value) in self.memory for value in arguments)
        self.memory.update((id(value), value) for value in arguments)
        return read


class RoundsWhatIsWatched(Sabotaged):
    def dispatch(self, *args: Any) -> Outputs:
        outputs = super().dispatch(*args)
        for output in outputs:
            output.data *= 1 + 1e-15
        return outputs


class TakesNoneForZero(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        if all(new is old for new, old in zip(folded, values, strict=True)):
            folded[0] = toy.Value(0.0)
        return folded


# Edits.


class RunsOnTheOldInputs(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        proceed(plan, values)
        return values


class HandsOutTheOldOutputs(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        proceed(plan, values)
        return values


class LooksForOutputEditsOnlyBehindTheOp(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        session = plan.steps[0]._context._session
        return proceed(plan, values) if session.wants(IPoint.AFTER_FORWARD) else values


class GivesRoutinesSomeOtherOutput(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        proceed(plan, [toy.Value(0.0) for _ in values])
        return values


class ReversesPositions(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values[::-1])
        return folded[::-1]


class GivesTheFirstInputOnly(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        for step in plan:
            given = 1 if step.action.positions is None else len(values)
            values = [*proceed(Plan([step]), values[:given]), *values[given:]]
        return values


class EditsInPlace(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        for old, new in zip(values, proceed(plan, values), strict=True):
            old.data = new.data
        return values


class EditsParametersInPlace(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(plan, values)
        for old, new in zip(values, folded, strict=True):
            if old.edge is not None and old.edge[0].name == "AccumulateGrad":
                old.data = new.data
        return folded


class RunsEachRoutineOnTheOriginal(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded = values
        for step in plan:
            folded = proceed(Plan([step]), values)
        return folded


class RunsRoutinesBackwards(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        folded: list[Any] = proceed(Plan(plan.steps[::-1]), values)
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


class ForgetsContexts(Sabotaged):
    def dispatch(self, attachment: SabotagedAttachment, *args: Any) -> Outputs:
        outputs = super().dispatch(attachment, *args)
        for context in attachment.session.contexts():
            attachment.session.forget(context)
        attachment.planned.clear()
        return outputs


class AlwaysCaches(Sabotaged):
    def is_caching(self, session: Session) -> bool:
        return True


class AsksForTheCacheOnce(ForgetsContexts):
    def before_attach(self, session: Session) -> None:
        self.memory["caching"] = session.caching

    def dispatch(self, attachment: SabotagedAttachment, *args: Any) -> Outputs:
        if self.memory["caching"]:
            return Sabotaged.dispatch(self, attachment, *args)
        return super().dispatch(attachment, *args)


class KeepsTheFirstPlan(Sabotaged):
    def fold_after(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        first = self.memory.setdefault(plan.steps[0]._context, plan)
        folded: list[Any] = proceed(first, values)
        return folded


class KnowsToolsByIdentityOnly(Sabotaged):
    def epoch_of(self, session: Session) -> int:
        tools = tuple(tool._amanda.serial for tool in session.tools)
        number: int = self.memory.setdefault(tools, len(self.memory))
        return number


class NeverLooksAgainWhereNothingWasAsked(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        planned = [p for p in attachment.planned.values() if p.context.op_type == op.name]
        return bool(planned) and all(p.is_empty for p in planned)


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


class IgnoresDisabled(Sabotaged):
    def is_enabled(self, session: Session) -> bool:
        return not session.closed and not THREAD.routine_depth


class GivesUpOnOpsThatRanDisabled(Sabotaged):
    def is_overlooked(self, attachment: Any, op: toy.Op, arguments: Any) -> bool:
        if not attachment.session.enabled:
            self.memory[op.name] = True
        return op.name in self.memory


class IgnoresNestedTools(Sabotaged):
    def epoch_of(self, session: Session) -> int:
        return session.tools[0]._amanda.generation


class GoesOnAfterRemoval(Sabotaged):
    def is_enabled(self, session: Session) -> bool:
        return session.control.enabled and not THREAD.routine_depth

    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        pass


class AttachesOnce(Sabotaged):
    @hookimpl
    def amanda_attach(self, session: Session) -> ToyAttachment | None:
        if "first" not in self.memory:
            self.memory["first"] = super().amanda_attach(session)
            return self.memory["first"]  # type: ignore[no-any-return]
        self._replace()
        first: ToyAttachment = self.memory["first"]
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


class WrapsExceptions(Sabotaged):
    def fold_before(self, proceed: Any, plan: Plan, values: list[Any]) -> list[Any]:
        try:
            folded: list[Any] = proceed(plan, values)
        except Exception as error:
            raise RuntimeError("a routine failed") from error
        return folded


class EndsWithTheFirstException(Sabotaged):
    def dispatch(self, *args: Any) -> Outputs:
        try:
            return super().dispatch(*args)
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


class MixesUpWords(Sabotaged):
    @hookimpl
    def amanda_prepare_context(self, context: OpContext) -> None:
        super().amanda_prepare_context(context)
        words = {"add": "mul", "mul": "add"}
        context["type"] = words.get(context["type"], context["type"])


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
    def coverage(self, found: Sequence[Blind]) -> Sequence[Blind]:
        return [Blind(blind.what, "") for blind in found]


class LeavesAFunctionBehind(Sabotaged):
    def detach(self, attachment: SabotagedAttachment, proceed: Callable[[], None]) -> None:
        proceed()
        vanilla = toy.dispatch
        toy.dispatch = lambda op, arguments: vanilla(op, arguments)


#: Core test -> the driver that it must not let pass.
BROKEN: Mapping[str, type[Sabotaged]] = {
    "test_each_op_is_seen_once_and_in_order": MissesAnOperator,
    "test_a_loop_executes_its_ops_each_time": SkipsTheSecondRoundOfALoop,
    "test_ids_stay_the_same_from_run_to_run": NumbersExecutions,
    "test_two_equal_ops_have_two_ids": TellsOpsApartByNameOnly,
    "test_readers_of_one_value_are_seen": SeesTheFirstReaderOnly,
    "test_watching_changes_nothing": RoundsWhatIsWatched,
    "test_routines_that_return_none_or_what_they_got_change_nothing": TakesNoneForZero,
    "test_an_input_is_edited": RunsOnTheOldInputs,
    "test_an_output_is_edited": HandsOutTheOldOutputs,
    "test_an_output_edit_asked_for_before_the_op": LooksForOutputEditsOnlyBehindTheOp,
    "test_an_output_is_the_value_that_the_op_computed": GivesRoutinesSomeOtherOutput,
    "test_a_routine_gets_the_positions_that_it_asked_for": ReversesPositions,
    "test_without_positions_a_routine_gets_all_inputs": GivesTheFirstInputOnly,
    "test_an_edit_is_of_one_op_only": EditsInPlace,
    "test_an_edited_parameter_stays_what_it_was": EditsParametersInPlace,
    "test_several_routines_run_in_order_each_on_what_the_last_one_made": (
        RunsEachRoutineOnTheOriginal
    ),
    "test_a_dependency_runs_first": RunsRoutinesBackwards,
    "test_keyword_arguments_come_by_reference": RemembersWhatRoutinesMade,
    "test_a_wrong_number_of_results_is_an_error": SwallowsWrongResults,
    "test_a_position_that_does_not_exist_is_an_error": SwallowsWrongPositions,
    "test_analysis_runs_once_an_op": ForgetsContexts,
    "test_analysis_runs_each_time_without_the_cache": AlwaysCaches,
    "test_the_cache_can_be_enabled_again": AsksForTheCacheOnce,
    "test_what_analysis_asked_for_is_forgotten_without_the_cache": KeepsTheFirstPlan,
    "test_an_invalidated_tool_is_asked_again": KnowsToolsByIdentityOnly,
    "test_a_routine_registered_later_runs": NeverLooksAgainWhereNothingWasAsked,
    "test_tools_applied_again_resume": StartsAnew,
    "test_inputs_before_and_outputs_behind": FillsOutputsEarly,
    "test_disabled_and_enabled": IgnoresDisabled,
    "test_disabled_from_the_beginning": GivesUpOnOpsThatRanDisabled,
    "test_a_nested_tool_runs_after_the_outer_one_and_only_inside": IgnoresNestedTools,
    "test_a_handle_is_removed_once": GoesOnAfterRemoval,
    "test_tools_are_applied_one_after_the_other": AttachesOnce,
    "test_a_model_built_while_tools_are_applied": OverlooksNewModels,
    "test_operators_inside_a_routine_are_not_instrumented": InstrumentsRoutines,
    "test_other_threads_run_as_without_tools": InstrumentsAllThreads,
    "test_an_exception_of_a_routine_keeps_its_type_and_says_where": WrapsExceptions,
    "test_a_session_survives_an_exception_of_a_routine": EndsWithTheFirstException,
    "test_a_failed_analysis_is_not_taken_for_a_done_one": CachesFailedAnalyses,
    "test_an_exception_that_leaves_apply_takes_the_tools_along": StaysAfterAnException,
    "test_facts_of_an_op": NamesNothing,
    "test_the_namespace_is_a_declared_one": HasAModeOfItsOwn,
    "test_operators_have_common_words": MixesUpWords,
    "test_keys_persist": ClearsKeys,
    "test_values_are_not_kept": NeverReleases,
    "test_the_value_of_a_parameter_is_known_in_analysis": KnowsNoParameters,
    "test_the_driver_describes_itself": ClaimsWhatNobodyKnows,
    "test_blind_spots_are_reported": GivesNoReasons,
    "test_everything_is_restored": LeavesAFunctionBehind,
}
