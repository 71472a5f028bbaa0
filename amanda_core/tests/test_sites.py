"""Op identity without a framework: call sites, scopes, weights and occurrences of toy operators.

Long, since it is a list of cases of one rule.
"""

from __future__ import annotations

import dataclasses
import gc
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from amanda_core import Site
from amanda_core.identity.identity import stable_id
from amanda_core.identity.sites import (
    FRAMES,
    FRAMEWORK,
    OWN,
    QUIET,
    STOP,
    USER,
    Level,
    Origin,
    Rules,
    Sites,
)
from amanda_core.modules.scopes import OUTSIDE, Activation, Labels, Scope, Scopes


class Tensor:
    """A value; `trained` tells what a framework knows of it."""

    def __init__(self, trained: bool = False) -> None:
        self.trained = trained


class Weight(Tensor):
    pass


class Module:
    """Holds modules and weights by name, and runs `body` when it is called."""

    def __init__(self, body: Callable[..., object] | None = None, **held: Any) -> None:
        self.children = {k: v for k, v in held.items() if isinstance(v, Module)}
        self.weights = {k: v for k, v in held.items() if isinstance(v, Weight)}
        self.body = body

    def named_weights(self) -> list[tuple[str, Module, Weight]]:
        own = [(name, self, weight) for name, weight in self.weights.items()]
        inner = [
            (f"{name}.{rest}", owner, weight)
            for name, child in self.children.items()
            for rest, owner, weight in child.named_weights()
        ]
        return [*own, *inner]


#: Names of functions of this file whose frames are of another kind.
KINDS = {
    "locate": OWN,
    "library": FRAMEWORK,
    "wrapper": FRAMEWORK,
    "call_module": STOP,
    "linked": FRAMEWORK,
    "unseen": QUIET,
}
RULES = Rules(
    kind_of=lambda code, _: KINDS.get(code.co_name, USER),
    weight_types=(Weight,),
    tensor_types=frozenset({Tensor}),
    is_weight=lambda tensor: bool(tensor.trained),
    zone_of=lambda: "model",
)


class Toy:
    """A driver that locates each op of `op`."""

    def __init__(self, rules: Rules = RULES) -> None:
        self.place = SimpleNamespace(activations=list[Activation]())
        self.scopes = Scopes(lambda module: module.children, Module.named_weights)
        self.dropped: list[Site] = []
        labels = Labels()
        self.sites: Sites[Site] = Sites(
            rules, self.place, self.scopes, labels, {}, "toy/1/eager", self.make, self.drop
        )
        self.callers: list[str] = []

    def make(self, site: Site, caller: str) -> Site:
        self.callers.append(caller)
        return site

    def drop(self, record: Site) -> None:
        self.dropped.append(record)

    def locate(self, *args: Any, op_type: str = "mul", **kwargs: Any) -> Site:
        found = self.sites.locate(op_type, args, kwargs)
        assert found is not None
        return found

    def call_module(self, module: Module, *args: Any) -> Any:
        activations = self.place.activations
        outer = activations[-1].scope if activations else None
        activations.append(Activation(self.scopes.enter(module, outer, False)))
        try:
            assert module.body is not None
            return module.body(*args)
        finally:
            activations.pop()


def key_of(site: Site) -> Any:
    return site.key


@pytest.fixture
def toy() -> Toy:
    return Toy()


def test_a_line_is_one_op_and_two_lines_are_two(toy: Toy) -> None:
    def program() -> list[Site]:
        first = toy.locate(1)
        second = toy.locate(1)
        return [first, second]

    (a, b), (again, _) = program(), program()
    assert a is again
    assert a.key != b.key
    assert [a.name, b.name] == ["mul", "mul#2"]
    assert len(toy.sites) == 2


def test_two_calls_on_one_line_are_two_ops(toy: Toy) -> None:
    a, b = toy.locate(1), toy.locate(1)
    assert a.key != b.key


def test_keys_hold_names_and_offsets_only() -> None:
    def run(toy: Toy) -> Site:
        model = Module(None, part=inner)
        model.body = lambda: toy.locate(1, weight)
        model.weights["w"] = weight
        site: Site = toy.call_module(model)
        return site

    inner, weight = Module(), Weight()
    one, other = run(Toy()), run(Toy())
    assert one.key == other.key
    assert stable_id(one.key) == stable_id(other.key)
    kind, root, path, op_type, frames, operands, occurrence = key_of(one)
    assert (kind, root, path, op_type, occurrence) == ("op", "Module", "", "mul", 0)
    assert operands == ((1, "w"),)
    ((module, name, line, offset),) = frames
    assert module == __name__
    assert name.endswith("<lambda>")
    assert line > 0  # Lambdas have no name of their own.
    assert offset % 2 == 0


def test_outside_of_modules_a_loop_is_one_op(toy: Toy) -> None:
    assert len({toy.locate(1).key for _ in range(5)}) == 1


def test_outside_of_modules_weights_tell_the_ops_of_a_loop_apart(toy: Toy) -> None:
    weights = [Tensor(trained=True) for _ in range(3)]
    flows = Tensor(trained=True)  # In front stands what flows, whatever it is.
    for _ in range(2):
        found = [toy.locate(flows, weight) for weight in weights]
        assert len({site.key for site in found}) == 3
    assert [key_of(site)[5] for site in found] == [((1, n),) for n in range(3)]
    assert len(toy.sites) == 3


def test_tensors_that_are_no_weights_tell_nothing_apart(toy: Toy) -> None:
    values = [Tensor(), Tensor(), 3, "four"]
    assert len({toy.locate(Tensor(), value).key for value in values}) == 1


def test_a_weight_given_by_keyword_counts_as_well(toy: Toy) -> None:
    found = [toy.locate(Tensor(), weight=Weight()) for _ in range(2)]
    assert key_of(found[0])[5] == ((1, 0),)


def test_a_subclass_of_weights_is_a_weight_and_of_tensors_is_none(toy: Toy) -> None:
    class Special(Weight):
        pass

    class Wrapped(Tensor):
        pass

    weight, wrapped = Special(), Wrapped(trained=True)
    assert key_of(toy.locate(wrapped, weight))[5] == ((1, 0),)
    assert key_of(toy.locate(Tensor(), wrapped))[5] == ()


def test_inside_a_module_passings_are_numbered(toy: Toy) -> None:
    module = Module(lambda: [toy.locate(1) for _ in range(3)])
    first, second = toy.call_module(module), toy.call_module(module)
    assert [key_of(site)[6] for site in first] == [0, 1, 2]
    assert first == second


def test_inside_a_module_only_weights_by_their_type_tell_ops_apart(toy: Toy) -> None:
    trained, weight = Tensor(trained=True), Weight()
    module = Module(lambda: [toy.locate(1, trained), toy.locate(1, weight)])
    assert [key_of(site)[5] for site in toy.call_module(module)] == [(), ((1, 0),)]


def test_an_endless_loop_in_a_module_makes_a_bounded_number_of_ops(toy: Toy) -> None:
    toy.call_module(Module(lambda: [toy.locate(1) for _ in range(3000)]))
    assert len(toy.sites) == 1025


def test_names_say_of_which_of_two_models_an_op_is(toy: Toy) -> None:
    models = [Module(lambda: toy.locate(1)) for _ in range(2)]
    assert [toy.call_module(model).name for model in models] == ["mul", "Module#2:mul"]


def test_inside_a_module_up_to_three_frames_of_the_users_count(toy: Toy) -> None:
    def inner() -> Site:
        return toy.locate(1)

    def middle() -> Site:
        return inner()

    def body() -> list[Site]:
        return [middle(), middle()]

    def deeper() -> list[Site]:
        def outer() -> Site:
            return middle()

        return [outer(), outer()]

    found = toy.call_module(Module(body))
    assert [len(key_of(site)[4]) for site in found] == [3, 3]
    assert key_of(found[0])[4] != key_of(found[1])[4]
    # Four frames away they are two occurrences of one site.
    found = toy.call_module(Module(deeper))
    assert key_of(found[0])[4] == key_of(found[1])[4]
    assert [key_of(site)[6] for site in found] == [0, 1]


def test_outside_of_modules_one_frame_counts(toy: Toy) -> None:
    def helper() -> Site:
        return toy.locate(1)

    assert [helper(), helper()][0] is helper()


def test_of_the_frameworks_frames_the_innermost_counts_if_it_calls(toy: Toy) -> None:
    def library(first: bool) -> Site:
        if first:
            return toy.locate(1)
        return toy.locate(1)

    def wrapper(first: bool) -> Site:
        return library(first)

    found = [wrapper(first) for first in (True, False)]
    labels = [[frame[1].rpartition(".")[2] for frame in key_of(site)[4]] for site in found]
    # Comprehensions have a frame of their own up to Python 3.11.
    assert [each[0] for each in labels] == ["library", "library"]
    assert [len(each) for each in labels] == [2, 2]
    assert found[0].key != found[1].key
    assert toy.callers == [__name__, __name__]


def test_a_frame_of_the_frameworks_that_calls_the_user_back_does_not_count(toy: Toy) -> None:
    def helper() -> Site:
        return toy.locate(1)

    def library() -> Site:
        return helper()

    def body() -> Site:
        return library()

    found = toy.call_module(Module(body))
    assert [frame[1].rpartition(".")[2] for frame in key_of(found)[4]] == ["helper", "body"]


def test_operators_of_quiet_frames_are_none_of_the_models(toy: Toy) -> None:
    def library() -> Site | None:
        return toy.sites.locate("mul", (1,), {})

    def unseen() -> Site | None:
        return library()

    assert unseen() is None
    assert library() is not None


def test_in_a_layered_framework_all_its_frames_count_up_to_the_users() -> None:
    toy = Toy(dataclasses.replace(RULES, is_layered=True))

    def library() -> Site:
        return toy.locate(1)

    def linked() -> Site:
        return library()

    def wrapper(first: bool) -> Site:
        if first:
            return linked()
        return linked()

    def program() -> list[Site]:
        return [wrapper(True), wrapper(False)]

    found = program()
    for site in found:
        names = [frame[1].rpartition(".")[2] for frame in key_of(site)[4]]
        assert names[:3] == ["library", "linked", "wrapper"]
    # Where one wrapper makes all operators of a type, the frames around it tell them apart.
    assert found[0].key != found[1].key
    assert key_of(found[0])[4][0] == key_of(found[1])[4][0]


def test_a_walk_says_what_a_short_cut_has_to_compare(toy: Toy) -> None:
    levels: list[Level] = []

    def library() -> list[Any]:
        return list(toy.sites.walk(sys._getframe(), FRAMES, levels))

    def call_module() -> list[Any]:
        return (lambda: library())()

    found = call_module()
    assert [code.code for code, _ in found] == [code for _, code, _ in levels[:-1]]
    assert [depth for depth, _, _ in levels] == [0, 1, 2]
    assert levels[-1] == (2, call_module.__code__, -1)
    # Without a limit it goes on to where call sites end.
    assert toy.sites.walk(sys._getframe(), -1) != toy.sites.walk(sys._getframe(), 1)


def test_the_ops_of_a_part_of_the_program_are_apart_from_all_others(toy: Toy) -> None:
    part = Scope(-1, "", "", zone="optimizer")
    weights = [(0, 1, Weight())]
    inside, outside = (
        toy.sites.passed(Origin("read", scope, ()), weights, {})[0] for scope in (part, OUTSIDE)
    )
    assert inside.key != outside.key
    assert (inside.zone, outside.zone) == ("optimizer", "model")


def test_a_call_site_ends_at_the_call_of_the_module(toy: Toy) -> None:
    module = Module(lambda: toy.locate(1))
    found = [toy.call_module(module), toy.call_module(module)]
    assert found[0] is found[1]


def test_a_site_says_where_in_the_source_it_is(toy: Toy) -> None:
    site, line = toy.locate(1), sys._getframe().f_lineno
    assert site.source == f"test_sites.py:{line}"


def test_of_a_dead_weight_the_records_go_and_its_number_is_free() -> None:
    for make in (Weight, partial(Tensor, trained=True)):
        toy = Toy()

        def program(weight: Tensor, toy: Toy = toy) -> Site:
            return toy.locate(Tensor(), weight)

        for _ in range(4):
            # Each is made after the previous one has died, as in a program that makes its weights
            # again. What tools have computed of one would be wrong for the next.
            assert key_of(program(make()))[5] == ((1, 0),)
            gc.collect()
        assert len(toy.sites) == 1
        assert len(toy.dropped) == 3


def test_native_code_asks_for_what_it_has_not_seen(toy: Toy) -> None:
    here = sys._getframe()
    code = toy.sites.classify(here.f_code, here.f_globals)
    assert (code.kind, code.code) == (USER, here.f_code)
    scope = toy.scopes.enter(Module(), None, False)
    found = toy.sites.resolve(Origin("mul", scope, [(code, 8)]), (), 2)
    assert not isinstance(found, int)
    assert key_of(found)[4] == ((*code.label, 8),)
    assert code.label[0] == __name__
    assert key_of(found)[6] == 2


@pytest.mark.parametrize("count", range(4))
@pytest.mark.parametrize("op_type", ["mul", "it's", 'a "name"'])
def test_a_key_is_printed_like_the_tuple_that_it_is(toy: Toy, count: int, op_type: str) -> None:
    # The op id is made of the printed form.
    here, weight = sys._getframe(), Weight()
    frames = [(toy.sites.classify(here.f_code, here.f_globals), 2 * n) for n in range(count)]
    for values in ((), (weight,), (weight, weight)):
        found = toy.sites.resolve(Origin(op_type, OUTSIDE, frames), values, 0)
        assert not isinstance(found, int)
        key = key_of(found)
        assert len(key[4]) == count
        assert repr(key) == repr(tuple(key))
        assert repr(type(key)(key)) == repr(tuple(key))


def test_a_passing_says_which_one_it_is(toy: Toy) -> None:
    origin = Origin("mul", toy.scopes.enter(Module(), None, False), ())
    counts = dict[Any, int]()
    occurrences = [toy.sites.passed(origin, (), counts) for _ in range(3)]
    assert [occurrence for _, _, occurrence in occurrences] == [0, 1, 2]
    (group,) = {group for _, group, _ in occurrences}
    assert group.records == {n: record for n, (record, _, _) in enumerate(occurrences)}
    assert counts == {group: 3}


def test_what_is_gone_is_forgotten_and_names_stay(toy: Toy) -> None:
    def program() -> Site:
        return toy.locate(1)

    first = program()
    toy.sites.discard(lambda site: site is first)
    assert len(toy.sites) == 0
    assert program().name == "mul"
    toy.sites.clear()
    assert program().key == first.key


# Scopes.


def paths(scopes: Scopes, root: Module, *modules: Module) -> list[str]:
    outer = scopes.enter(root, None, False)
    return [scopes.enter(module, outer, False).path for module in modules]


@pytest.fixture
def scopes() -> Scopes:
    return Scopes(lambda module: module.children, Module.named_weights)


def test_paths_are_made_of_the_names_under_the_root(scopes: Scopes) -> None:
    leaf = Module()
    part = Module(leaf=leaf)
    root = Module(part=part)
    assert paths(scopes, root, part, leaf) == ["part", "part.leaf"]
    # By itself it is a root of its own.
    assert scopes.enter(part, None, False).root == "Module#2"


def test_a_module_that_none_holds_is_numbered_by_first_call(scopes: Scopes) -> None:
    root, one, other = Module(), Module(), Module()
    assert paths(scopes, root, one, other, one) == ["<Module>", "<Module>#2", "<Module>"]


def test_names_are_free_again_once_a_module_is_gone(scopes: Scopes) -> None:
    root = Module()
    for _ in range(3):
        assert paths(scopes, root, Module()) == ["<Module>"]
        gc.collect()
    roots = [scopes.enter(Module(), None, False).root for _ in range(2)]
    gc.collect()
    assert [label for label, path in scopes.take_dead() if path is None] == roots
    assert scopes.dead == []


def test_the_label_of_a_dead_root_is_free_once_its_ops_are_forgotten(scopes: Scopes) -> None:
    kept = Module()
    scopes.enter(kept, None, False)
    assert scopes.enter(Module(), None, False).root == "Module#2"
    gc.collect()
    scopes.free(label for label, _ in scopes.take_dead())
    assert scopes.enter(Module(), None, False).root == "Module#2"


def test_a_path_with_another_module_is_dead(scopes: Scopes) -> None:
    old, new = Module(), Module()
    root = Module(part=old)
    assert paths(scopes, root, old) == ["part"]
    root.children["part"] = new
    assert paths(scopes, root, new) == ["part"]
    assert scopes.take_dead() == [("Module", "part")]
    assert paths(scopes, root, old) == ["<Module>"]


def test_in_a_backward_pass_a_part_runs_in_the_scope_that_it_had(scopes: Scopes) -> None:
    part = Module()
    root = Module(part=part)
    paths(scopes, root, part)
    assert scopes.enter(part, None, True).path == "part"


def test_weights_have_the_names_that_the_root_gives_them(scopes: Scopes) -> None:
    weight, new = Weight(), Weight()
    part = Module(w=weight)
    root = Module(part=part)
    scope = scopes.enter(root, None, False)
    assert scopes.weight_name(scope, weight) == "part.w"
    assert scopes.weight_name(scope, new) is None
    part.weights["w"] = new
    assert scopes.weight_name(scope, new) == "part.w"
    # It is no longer a weight of the model.
    assert scopes.weight_name(scope, weight) is None
    assert scopes.roots() == [root]


def test_holders_lead_outwards(scopes: Scopes) -> None:
    leaf = Module()
    part = Module(leaf=leaf)
    root = Module(part=part)
    outer = scopes.enter(root, None, False)
    inner = scopes.enter(leaf, outer, False)
    assert scopes.holders(leaf, inner, None) == [(part, "leaf"), (root, "part")]
    assert scopes.holders(leaf, inner, scopes.enter(part, outer, False)) == [(part, "leaf")]


# Frameworks whose modules have names.


class Named(Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


@pytest.fixture
def named() -> Scopes:
    return Scopes(lambda _: {}, Module.named_weights, lambda module: str(module.name))


def test_a_named_module_has_a_path_wherever_it_is_called(named: Scopes) -> None:
    root, shared, other = Named("net"), Named("shared"), Named("shared")
    top = named.enter(root, None, False)
    block = named.enter(Named("block"), top, False)
    assert (top.root, top.path) == ("net", "net")
    assert named.enter(shared, top, False).path == "net/shared"
    assert named.enter(shared, block, False).path == "net/block/shared"
    assert named.enter(other, top, False).path == "net/shared#2"
    assert named.enter(shared, top, False) is named.enter(shared, top, False)
    # By itself it is a root.
    assert named.enter(shared, None, False).path == "shared"
    second = Named("net")
    assert named.enter(second, None, False).path == "net#2"


def test_names_of_ops_lead_with_the_root_of_a_named_module(named: Scopes) -> None:
    toy = Toy()
    toy.scopes = named
    toy.sites = Sites(RULES, toy.place, named, Labels(), {}, "toy/1/eager", toy.make, toy.drop)
    models = [Named("net") for _ in range(2)]
    for model in models:
        model.body = lambda: toy.locate(1)
    assert [toy.call_module(model).name for model in models] == ["net/mul", "net#2/mul"]


def test_with_a_named_module_its_path_ends(named: Scopes) -> None:
    root = Named("net")
    top = named.enter(root, None, False)
    numbers = set()
    for _ in range(3):
        scope = named.enter(Named("part"), top, False)
        assert scope.path == "net/part"
        gc.collect()
        assert named.take_dead() == [("net", "net/part")]
        numbers.add(scope.number)
    # What is kept by the number of a scope is not another module's.
    assert len(numbers) == 3


def test_with_a_named_root_all_below_it_ends(named: Scopes) -> None:
    shared = Named("shared")

    def program() -> list[str]:
        root = Named("net")
        return paths(named, root, shared)

    for _ in range(3):
        assert program() == ["net/shared"]
        gc.collect()
        dead = named.take_dead()
        assert set(dead) == {("net", None), ("net", "net"), ("net", "net/shared")}
        named.free(label for label, path in dead if path is None)


def test_tensors_may_carry_their_tokens() -> None:
    carried = {"weight": 7, "value": -8}
    labels = Labels(lambda tensor: carried[tensor.name])
    tensors = [Named(name) for name in carried]
    assert [labels.look_up(tensor) for tensor in tensors] == [(7, 0), (-8, 1)]
    del tensors
    gc.collect()
    assert labels.take_dead() == {-8, 7}


def test_the_smallest_free_number_is_given_to_a_tensor() -> None:
    labels = Labels()
    tensors = [Named(str(number)) for number in range(6)]
    assert [labels.look_up(tensor)[1] for tensor in tensors] == [0, 1, 2, 3, 4, 5]
    tokens = {labels.look_up(tensor)[0] for tensor in tensors}
    del tensors[3], tensors[1]
    gc.collect()
    new = [Named(str(number)) for number in range(3)]
    assert [labels.look_up(tensor)[1] for tensor in new] == [1, 3, 6]
    assert tokens.isdisjoint(labels.look_up(tensor)[0] for tensor in new)


def test_an_activation_that_is_resumed_goes_on_counting() -> None:
    activation = Activation(Scopes(lambda _: {}, lambda _: ()).enter(Module(), None, False))
    activation.counts["site"] = 2
    copy = activation.copy()
    copy.counts["site"] += 1
    assert (activation.counts, copy.counts) == ({"site": 2}, {"site": 3})


def test_a_module_is_collected_while_its_root_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    class Collecting(list[Any]):
        def append(self, item: object) -> None:
            gc.collect()
            super().append(item)

    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    scopes = Scopes(lambda module: module.children, lambda module: ())
    root, made = Module(), Module()
    made.children["itself"] = made
    scope = scopes.enter(root, None, False)
    scopes.enter(made, scope, False)
    scopes.dead = Collecting()
    gc.disable()
    try:
        del made, root
    finally:
        gc.enable()
    assert unraisable == []
    assert scopes.take_dead()[-1] == (scope.root, None)
