"""Collectives of torch.distributed write the tensors that they were given, even if tools edit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import amanda
from amanda_core.errors import AmandaError
from amanda_core.testing.kit.tools import Everywhere
from amanda_driver_torch import interceptor
from amanda_driver_torch.execution import collectives


@pytest.fixture(scope="module")
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Set up a process group of this process alone."""
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def copies(*values: Any) -> Any:
    return tuple(v.clone() if isinstance(v, torch.Tensor) else v for v in values)


@pytest.mark.usefixtures("group")
def test_they_write_their_own_arguments_though_operators_are_edited() -> None:
    given = torch.arange(4.0)
    expected = [given, given, given, given]
    with amanda.apply(Everywhere(copies)):
        scattered, gathered, reduced, sent = (torch.zeros(4) for _ in range(4))
        dist.scatter(scattered, [given])
        dist.all_gather([gathered], given)
        reduced += given
        dist.all_reduce(reduced)
        sent += given
        dist.broadcast(sent, 0)
    for found, wanted in zip((scattered, gathered, reduced, sent), expected, strict=True):
        assert torch.equal(found, wanted)


class Seen(amanda.Tool):
    """Notes what routines before and after collectives get."""

    def __init__(self, *, after: bool = True) -> None:
        super().__init__()
        self.before: list[Any] = []
        self.after: list[Any] = []
        self.contexts: list[amanda.OpContext] = []
        self.inserts_after = after
        self.add_inst_for_op(self.analyse)

    def analyse(self, context: amanda.OpContext) -> None:
        if "c10d" in context.op_type:
            self.contexts.append(context)
            context.insert_before_op(self._note, observe=True, notes=self.before)
            if self.inserts_after:
                context.insert_after_op(self._note, observe=True, notes=self.after)

    def _note(self, *values: Any, notes: list[Any]) -> None:
        notes.append([_copied(value) for value in values])


def _copied(value: Any) -> Any:
    return [one.tolist() for one in value] if isinstance(value, list) else value.tolist()


def scaled(value: Any) -> Any:
    return [3 * one for one in value] if isinstance(value, list) else 3 * value


def inserting(**routines: Any) -> amanda.Tool:
    """Return a tool that inserts routines at collectives, each by a method of contexts."""

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type.startswith("c10d::"):
            for insert, routine in routines.items():
                getattr(context, insert)(routine)

    tool = amanda.Tool()
    tool.add_inst_for_op(analyse)
    return tool


#: Function -> a call of it with a value and a destination, its common type, and whether it writes
#: the value.
CALLS: dict[str, tuple[Any, str | None, bool]] = {
    "all_reduce": (lambda a, b: dist.all_reduce(a), "all_reduce", True),
    "broadcast": (lambda a, b: dist.broadcast(a, 0), "broadcast", True),
    "reduce": (lambda a, b: dist.reduce(a, 0), None, True),
    "all_gather": (lambda a, b: dist.all_gather([b], a), "all_gather", False),
    "all_gather_into_tensor": (
        lambda a, b: dist.all_gather_into_tensor(b, a),
        "all_gather",
        False,
    ),
    "gather": (lambda a, b: dist.gather(a, [b]), None, False),
    "scatter": (lambda a, b: dist.scatter(b, [a]), None, False),
    "reduce_scatter": (lambda a, b: dist.reduce_scatter(b, [a]), "reduce_scatter", False),
    "reduce_scatter_tensor": (
        lambda a, b: dist.reduce_scatter_tensor(b, a),
        "reduce_scatter",
        False,
    ),
    "all_to_all": (lambda a, b: dist.all_to_all([b], [a]), "all_to_all", False),
    "all_to_all_single": (lambda a, b: dist.all_to_all_single(b, a), "all_to_all", False),
}


def supported(call: Any) -> None:
    """Skip the test if gloo lacks a collective in this release."""
    try:
        call(torch.zeros(2), torch.zeros(2))
    except RuntimeError as error:
        pytest.skip(str(error))


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_routines_get_what_is_given_and_what_is_written(name: str) -> None:
    call, common_type, in_place = CALLS[name]
    given, written, tool = torch.tensor([1.0, 2.0]), torch.zeros(2), Seen()
    supported(call)
    with amanda.apply(tool):
        for _ in range(2):
            call(given, written)
    assert [context.op_type for context in tool.contexts] == [f"c10d::{name}"]
    (context,) = tool.contexts
    assert (context["type"], context["group"], context["bytes"]) == (common_type, (0,), 8)
    assert context["wait"] > 0
    assert tool.before == tool.after == 2 * [[[1.0, 2.0]]]
    assert (given if in_place else written).tolist() == [1.0, 2.0]


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")
@pytest.mark.parametrize("name", CALLS)
def test_edits_are_sent_and_results_are_edited(name: str) -> None:
    call, _, in_place = CALLS[name]
    tool = inserting(insert_before_op=scaled, insert_after_op=scaled)
    given, written = torch.tensor([1.0, 2.0]), torch.zeros(2)
    supported(call)
    with amanda.apply(tool):
        call(given, written)
    # What is only sent stays what it is in the program.
    assert given.tolist() == ([9.0, 18.0] if in_place else [1.0, 2.0])
    assert written.tolist() == ([0.0, 0.0] if in_place else [9.0, 18.0])


@pytest.mark.usefixtures("group")
def test_routines_after_it_run_when_the_program_waits() -> None:
    tool = Seen()
    with amanda.apply(tool):
        works = [dist.all_reduce(torch.full((1,), n), async_op=True) for n in (1.0, 2.0)]
        torch.ones(1)
        assert (tool.before, tool.after) == ([[[1.0]], [[2.0]]], [])
        works[1].wait()
        assert tool.after == [[[2.0]]]
        works[0].wait()
        works[0].wait()
        assert tool.after == [[[2.0]], [[1.0]]]
        dist.barrier()
    assert tool.contexts[-1]["type"] == "barrier"
    assert (tool.before[-1], tool.after[-1]) == ([], [])


@pytest.mark.usefixtures("group")
def test_what_the_program_never_waits_for_is_noted() -> None:
    tool = Seen()
    with amanda.apply(tool):
        dist.all_reduce(torch.ones(1), async_op=True).get_future().wait()
    assert tool.after == []
    assert any("c10d::all_reduce" in one and "did not wait for" in one for one in tool.not_seen())


@pytest.mark.usefixtures("group")
def test_tools_of_another_time_are_not_called() -> None:
    early, late = Seen(), Seen()
    with amanda.apply(early):
        work = dist.all_reduce(torch.ones(1), async_op=True)
        with amanda.apply(late):
            work.wait()
        left = dist.all_reduce(torch.ones(1), async_op=True)
    assert (len(early.after), late.after) == (1, [])
    left.wait()
    assert len(early.after) == 1


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        gradient = gradient.clone()
        dist.broadcast(gradient, 0)
        return gradient


@pytest.mark.usefixtures("group")
def test_they_are_seen_inside_of_functions_and_of_backward_passes() -> None:
    tool, x = Seen(), torch.tensor([2.0], requires_grad=True)
    hook = x.register_post_accumulate_grad_hook
    hook(lambda leaf: dist.reduce(leaf.grad, 0))  # type: ignore[no-untyped-call]
    with amanda.apply(tool):
        for _ in range(2):
            _Summed.apply(x).mul(3).sum().backward()  # type: ignore[no-untyped-call]
            x.grad = None
        found = [context.op_type for context in tool.contexts]
        assert found == ["c10d::all_reduce", "c10d::broadcast", "c10d::reduce"]
        assert tool.after == 2 * [[[2.0]], [[3.0]], [[3.0]]]
        # The operators are the same if another line begins the backward pass.
        torch.autograd.backward(_Summed.apply(x).sum())  # type: ignore[no-untyped-call]
    assert (len(tool.contexts), len(tool.after)) == (3, 9)


@pytest.mark.usefixtures("group")
def test_weights_distinguish_them() -> None:
    model, tool = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), Seen()
    with amanda.apply(tool):
        for _ in range(2):
            for parameter in model.parameters():
                dist.broadcast(parameter, 0)
    assert len({context.op_id for context in tool.contexts}) == len(tool.contexts) == 4


@pytest.mark.usefixtures("group")
def test_refusals() -> None:
    def refused(**inserted: Any) -> str:
        with amanda.apply(inserting(**inserted)), pytest.raises(AmandaError) as error:
            dist.reduce_scatter(torch.ones(2), [torch.ones(2)])
        return str(error.value)

    assert "A collective cannot be replaced" in refused(replace_op=lambda x: x)
    assert "shape" in refused(insert_before_op=lambda x: x[:1])
    assert "2 values" in refused(insert_before_op=lambda x: [x, x])
    assert "float64" in refused(insert_after_op=lambda x: x.double())


@pytest.mark.usefixtures("group")
def test_lists_are_sent_with_as_many_tensors() -> None:
    group: Any = dist.group.WORLD
    given, written = ([torch.full((1,), n) for n in both] for both in ((1.0, 2.0), (0.0, 0.0)))
    tool = inserting(insert_before_op=lambda values: [3 * value for value in values])
    with amanda.apply(tool):
        group.allgather_into_tensor_coalesced(written, given).wait()
    assert [one.tolist() for one in (*given, *written)] == [[1.0], [2.0], [3.0], [6.0]]
    with (
        amanda.apply(inserting(insert_before_op=lambda values: values[:1])),
        pytest.raises(AmandaError, match="1 tensors cannot be sent in place of 2"),
    ):
        group.allgather_into_tensor_coalesced(written, given)


@pytest.mark.usefixtures("group")
def test_one_tensor_in_several_places_is_edited_in_one() -> None:
    group: Any = dist.group.WORLD
    given, written = torch.ones(1), [torch.zeros(1), torch.zeros(1)]
    tool = inserting(insert_before_op=lambda values: [3 * values[0], values[1]])
    with amanda.apply(tool):
        group.allgather_into_tensor_coalesced(written, [given, given]).wait()
    assert [one.tolist() for one in (given, *written)] == [[1.0], [3.0], [1.0]]


@pytest.mark.one_interceptor
@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(("selected", "pending"), [(None, 0), ([], 1)])
def test_routines_get_what_functional_collectives_have_written(
    compiled: bool, selected: list[int] | None, pending: int
) -> None:
    found: list[int] = []

    def look(*values: Any) -> None:
        # Works stay in torch's registry until their tensor has been waited for.
        found.append(torch._C._distributed_c10d._get_work_registry_size())

    def analyse(context: amanda.OpContext) -> None:
        if context.op_type == "_c10d_functional::all_reduce":
            context.insert_after_op(look, outputs=selected, observe=True)

    def summed(x: torch.Tensor) -> torch.Tensor:
        ops: Any = torch.ops._c10d_functional
        result: torch.Tensor = ops.wait_tensor(ops.all_reduce(x, "sum", name))
        return result

    name, tool = dist.group.WORLD.group_name, amanda.Tool()  # type: ignore[union-attr]
    tool.add_inst_for_op(analyse)
    call = torch.compile(summed, backend="aot_eager") if compiled else summed
    with amanda.apply(tool):
        for number in (1.0, 2.0, 3.0):
            assert call(torch.full((2,), number)).tolist() == [number, number]
    assert found == 3 * [pending]


@pytest.mark.usefixtures("group")
def test_a_failure_of_the_driver_is_survived(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(group: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(collectives, "ranks_of", fails)
    x, tool = torch.ones(1), Seen()
    with amanda.apply(tool, on_driver_error="skip"):
        dist.all_reduce(x)
    assert x.tolist() == [1.0]
    assert any("where a driver failed: c10d::all_reduce" in one for one in tool.not_seen())
    with amanda.apply(Seen()), pytest.raises(ZeroDivisionError):
        dist.all_reduce(x)


@pytest.mark.usefixtures("group")
def test_calls_by_keyword_are_listed_and_nothing_stays_replaced() -> None:
    owners: list[Any] = [dist.ProcessGroup, dist.Work, vars(dist)["Reducer"]]
    before = [dict(vars(owner)) for owner in owners]
    tool, x = Seen(), torch.ones(1)
    with amanda.apply(tool):
        group = dist.group.WORLD
        assert group is not None
        group.allreduce(tensors=[x]).wait()
        with amanda.disabled():
            dist.all_reduce(x)
    assert tool.contexts == []
    assert any("c10d::all_reduce" in one and "by keyword" in one for one in tool.not_seen())
    assert [dict(vars(owner)) for owner in owners] == before


def test_what_is_not_seen_of_them_is_listed() -> None:
    found = {gap.what for gap in interceptor().limits}
    assert "collectives that C++ code begins" in found
