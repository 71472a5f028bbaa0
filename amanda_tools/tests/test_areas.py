"""Live memory over time by module: adds up, has the peak, and divides large modules."""

from __future__ import annotations

import itertools
import random

import pytest

from amanda_tools.memory.areas import MODULES, MOMENTS, REST, Areas, Change, areas


def changes_of(homes: list[str], count: int, seed: int) -> list[Change]:
    """Return births and deaths of buffers at random."""
    chance, found, live = random.Random(seed), [], [0] * len(homes)
    for time in range(count):
        owner = chance.randrange(len(homes))
        size = (
            chance.randrange(1, 1000) if not live[owner] or chance.random() < 0.6 else -live[owner]
        )
        live[owner] += size
        found.append(Change(1000 * time, owner, size))
    return found


@pytest.mark.parametrize("count", [1, 7, 5000])
def test_the_areas_add_up_to_what_is_live_and_have_the_peak(count: int) -> None:
    homes = [f"net.layers.{n % 12}.conv" for n in range(30)] + ["head", "(optimizer)"]
    changes = changes_of(homes, count, seed=count)
    live = list(itertools.accumulate(change.size for change in changes))
    found = areas(changes, homes)
    sums = [sum(at) for at in zip(*(module["live"] for module in found.modules), strict=True)]
    ends = [*(round(time * 1e9) for time in found.times[1:]), float("inf")]
    for begin, end, drawn in zip(found.times, ends, sums, strict=True):
        within = [
            after
            for change, after in zip(changes, live, strict=True)
            if round(begin * 1e9) <= change.time < end
        ]
        before = [
            after
            for change, after in zip(changes, live, strict=True)
            if change.time < round(begin * 1e9)
        ]
        assert drawn == (max(within) if within else before[-1])
    assert max(sums) == max(live)
    assert sums[-1] == live[-1]
    assert len(found.modules) <= MODULES + 1
    # Points that are nearer than a pixel are left out of a drawing: 360 of them are a phone.
    steps = [later - earlier for earlier, later in itertools.pairwise(found.times)]
    assert min(steps) >= found.times[-1] / (MOMENTS + 1)


def test_a_plateau_is_what_was_left_and_not_the_peak_before() -> None:
    changes = [Change(0, 0, 5), Change(1, 0, 100), Change(2, 0, -98), Change(4000, 0, 1)]
    found = areas(changes, ["a"])
    assert found.modules == [{"name": "a", "live": [105, 7, 7, 8, 8]}]
    # Stretches of 21 ns: the last change is in the one from 3990.
    assert found.times == pytest.approx([0, 21e-9, 3969e-9, 3990e-9, 4011e-9])


def test_the_largest_modules_are_divided_first() -> None:
    homes = ["net.stem", "net.body.0.conv", "net.body.1.conv", "head"]
    changes = [Change(n, n, size) for n, size in enumerate([10, 500, 400, 20])]
    names = [module["name"] for module in areas(changes, homes).modules]
    assert names == ["net.body.0.conv", "net.body.1.conv", "head", "net.stem"]
    # More of them than areas: the last is all others.
    homes = [f"net.{n}" for n in range(20)]
    found = areas([Change(n, n, 100) for n in range(20)], homes)
    assert [module["name"] for module in found.modules] == ["net"]
    homes = [f"top{n}" for n in range(20)]
    found = areas([Change(n, n, 100) for n in range(20)], homes)
    assert [module["name"] for module in found.modules][MODULES:] == [REST]
    assert found.modules[-1]["live"][-1] == 1300


def test_what_existed_before_is_in_no_area() -> None:
    assert areas([Change(0, None, 5)], []) == Areas([], [])
    assert areas([], []) == Areas([], [])
    found = areas([Change(0, None, 5), Change(9, 0, 7)], ["a"])
    assert found == Areas([0.0, 1e-9], [{"name": "a", "live": [7, 7]}])
