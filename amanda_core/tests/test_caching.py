"""When analysis runs: the cache, epochs, resuming, invalidation, weak caches, ids."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

import amanda
from amanda_core import IPoint, OpContext, Tool
from amanda_core.testing.toy import framework as toy

from .making import session_of, site, tool

pytestmark = pytest.mark.usefixtures("driver")


def model() -> float:
    return toy.relu(toy.Value(3.0)).data


# The cache.


def test_analysis_runs_once_per_op_while_the_cache_is_on() -> None:
    seen: list[int] = []
    with amanda.apply(tool(lambda context: seen.append(context.get_op_id()))):
        for _ in range(2):
            model()
            toy.relu(toy.Value(1.0))
    assert len(seen) == 2
    assert len(set(seen)) == 2


def test_cache_disabled_runs_analysis_at_every_execution() -> None:
    seen: list[str] = []
    inserted: list[str] = []

    def analyse(context: OpContext) -> None:
        seen.append("analysis")
        context.insert_before_op(lambda x: inserted.append("routine"))

    with amanda.apply(tool(analyse)):
        model()
        with amanda.cache_disabled():
            model()
            model()
            with amanda.cache_enabled():
                model()
        model()
    assert len(seen) == 1 + 2
    # The actions of the last analysis replaced the earlier ones.
    assert len(inserted) == 5


def test_failed_analysis_is_not_cached() -> None:
    attempts: list[str] = []

    def analyse(context: OpContext) -> None:
        attempts.append("x")
        context.insert_after_op(lambda y: toy.Value(7.0))
        if len(attempts) < 3:
            raise ValueError("not yet")

    with amanda.apply(tool(analyse)):
        for _ in range(2):
            with pytest.raises(ValueError, match="not yet"):
                model()
        assert model() == 7.0
        assert model() == 7.0
    assert len(attempts) == 3


def test_the_analysis_of_other_tools_is_cached_when_one_fails() -> None:
    seen: list[str] = []

    def fail(context: OpContext) -> None:
        raise ValueError

    with amanda.apply(tool(lambda c: seen.append("good")), tool(fail)):
        for _ in range(2):
            with pytest.raises(ValueError):  # noqa: PT011
                model()
    assert seen == ["good"]


def test_analysis_is_not_cached_when_a_rule_behind_it_fails() -> None:
    seen: list[str] = []
    rules = Tool()

    def fail_once(context: OpContext) -> None:
        if len(seen) == 1:
            raise ValueError("rule")

    rules.add_context_rule(after=fail_once)
    with amanda.apply(rules, tool(lambda c: seen.append("analysis"))):
        with pytest.raises(ValueError, match="rule"):
            model()
        model()
        model()
    assert len(seen) == 2


def test_same_tools_applied_again_resume() -> None:
    seen: list[OpContext] = []
    executed: list[str] = []

    def analyse(context: OpContext) -> None:
        seen.append(context)
        context["key"] = "kept"
        context.insert_before_op(lambda x: executed.append(context["key"]))

    first, second = tool(analyse), Tool()
    epochs = set()
    for _ in range(3):
        with amanda.apply(first, second) as handle:
            model()
            epochs.add(session_of(handle).epoch)
    assert len(seen) == 1
    assert executed == ["kept"] * 3
    assert len(epochs) == 1


def test_other_tools_applied_do_not_resume() -> None:
    seen: list[OpContext] = []
    watching = tool(seen.append)
    with amanda.apply(watching) as handle:
        model()
        epoch = session_of(handle).epoch
    with amanda.apply(watching, Tool()) as handle:
        model()
        assert session_of(handle).epoch != epoch
    assert len(seen) == 2
    assert seen[0] is not seen[1]


def test_nested_tools_change_the_epoch_and_give_it_back() -> None:
    inner = Tool()
    with amanda.apply(Tool()) as handle:
        session = session_of(handle)
        outside = session.epoch
        with amanda.apply(inner):
            inside = session.epoch
        assert inside != outside
        assert session.epoch == outside
        with amanda.apply(inner):
            assert session.epoch == inside


def test_invalidate_makes_analysis_run_again() -> None:
    seen: list[OpContext] = []

    def analyse(context: OpContext) -> None:
        seen.append(context)
        value = float(len(seen))
        context.insert_after_op(lambda y: toy.Value(value))

    scheduled, other = tool(analyse), []
    with amanda.apply(scheduled, tool(lambda c: other.append(c))):
        assert [model(), model()] == [1.0, 1.0]
        seen[0]["key"] = "stays"
        scheduled.invalidate()
        assert [model(), model()] == [2.0, 2.0]
    assert seen[0] is seen[1]
    assert seen[1]["key"] == "stays"
    assert len(other) == 1
    scheduled.invalidate()
    with amanda.apply(scheduled):
        assert model() == 3.0


def test_invalidate_inside_the_own_analysis_keeps_what_it_asks_for() -> None:
    def analyse(context: OpContext) -> None:
        scheduled.invalidate()
        context.insert_after_op(lambda y: toy.Value(8.0))

    scheduled = tool(analyse)
    with amanda.apply(scheduled):
        assert [model(), model()] == [8.0, 8.0]


# Weak caches.


class Heavy(Tool):
    """A tool whose plans refer to it, and whose actions refer to the context."""

    def __init__(self) -> None:
        self.add_inst_for_op(
            lambda context: context.insert_before_op(self.routine, context=context)
        )

    def routine(self, *values: Any, context: OpContext) -> None:
        pass


def test_caches_hold_tools_weakly() -> None:
    heavy = Heavy()
    with amanda.apply(heavy) as handle:
        model()
        (context,) = map(weakref.ref, session_of(handle).contexts())
    alive = weakref.ref(heavy)
    del heavy, handle
    gc.collect()
    assert (alive(), context()) == (None, None)


@pytest.mark.parametrize("newest_first", [False, True])
def test_a_long_lived_tool_does_not_keep_newer_ones_alive(newest_first: bool) -> None:
    lasting = Heavy()
    newer = Heavy()
    with amanda.apply(*([newer, lasting] if newest_first else [lasting, newer])) as handle:
        model()
        (context,) = map(weakref.ref, session_of(handle).contexts())
    alive = weakref.ref(newer)
    del newer, handle
    gc.collect()
    assert (alive(), context()) == (None, None)


def test_a_tool_keeps_a_bounded_number_of_sessions() -> None:
    lasting = Tool()
    others = [Heavy() for _ in range(20)]
    newest = Heavy()
    contexts: list[weakref.ref[OpContext]] = []
    for other in others:
        with amanda.apply(lasting, other, newest) as handle:
            model()
            contexts += map(weakref.ref, session_of(handle).contexts())
    del handle
    gc.collect()
    kept = [index for index, context in enumerate(contexts) if context() is not None]
    assert kept == [16, 17, 18, 19]


# Ids.


def test_the_same_op_has_the_same_id_and_another_operator_another() -> None:
    seen: list[tuple[str, int]] = []
    chosen: list[Callable[[toy.Value], object]] = [toy.relu, toy.relu, toy.pair]
    with (
        amanda.apply(tool(lambda c: seen.append((c.op_type, c.get_op_id())))),
        amanda.cache_disabled(),
    ):
        for function in chosen:
            function(toy.Value(1.0))
    (_, first), (_, second), (_, other) = seen
    assert first == second != other


def test_ids_with_one_hash_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("amanda_core.engine.context.stable_id", lambda key: 5)
    with amanda.apply() as handle:
        session = session_of(handle)
        first, second = session.open(site("a"), None), session.open(site("b"), None)
        assert (first.get_op_id(), second.get_op_id()) == (5, 6)
        assert session.open(site("a"), None) is first
        assert session.open(site("b"), None) is second
        # The same backward site of two forward ops is two backward ops.
        backward = [
            session.open(site("grad"), None, forward=forward, backward=True)
            for forward in (first, second)
        ]
        assert [context.get_backward_op_id() for context in backward] == [5, 6]
        assert [context.forward for context in backward] == [first, second]


def test_one_key_in_two_namespaces_is_two_ops() -> None:
    namespaces = ["toy/1.2.3/eager", "toy/1.2.3/graph", "other/1.2.3/eager"]

    def ids(order: list[str]) -> dict[str, int]:
        with amanda.apply() as handle:
            session = session_of(handle)
            contexts = [session.open(site("a", namespace=name), None) for name in order]
            assert [context.namespace for context in contexts] == order
            return {context.namespace: context.get_op_id() for context in contexts}

    found = ids(namespaces)
    assert len(set(found.values())) == 3
    assert ids(namespaces[::-1]) == found  # Whichever runs first.


def test_an_op_has_the_same_id_under_another_version_of_its_framework() -> None:
    ids = set()
    for version in ("1.2.3", "1.3.0"):
        with amanda.apply() as handle:
            context = session_of(handle).open(site(namespace=f"toy/{version}/eager"), None)
            ids.add(context.get_op_id())
    assert len(ids) == 1


def test_a_forgotten_context_is_made_anew_with_the_same_id() -> None:
    seen: list[OpContext] = []
    with amanda.apply(tool(seen.append)) as handle:
        session = session_of(handle)
        for _ in range(2):
            context = session.open(site(), None, [1.0])
            context["key"] = 1
            context.trigger_callback(IPoint.BEFORE_FORWARD)
            session.forget(context)
        assert list(session.contexts()) == []
    assert len(seen) == 2
    assert seen[0] is not seen[1]
    assert seen[0].get_op_id() == seen[1].get_op_id()


def test_what_analysis_asks_anew_without_cache_holds_for_plans_cached_before() -> None:
    factor = [2.0]

    def analyse(context: OpContext) -> None:
        context.insert_after_op(lambda y, by: toy.Value(y.data * by), by=factor[0])

    with amanda.apply(tool(analyse)):
        assert [toy.relu(toy.Value(1.0)).data for _ in range(2)] == [2.0, 2.0]
        factor[0] = 5.0
        for caching, expected in ((amanda.cache_disabled(), 5.0), (amanda.cache_enabled(), 5.0)):
            with caching:
                assert toy.relu(toy.Value(1.0)).data == expected
