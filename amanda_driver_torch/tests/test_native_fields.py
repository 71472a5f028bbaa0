"""Watches and programs are made of one object each, whose fields C and Python name alike."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from amanda_driver_torch.torch_internals import extension
from amanda_driver_torch.torch_internals.native_fields import (
    GradientFields,
    ProgramFields,
    WatchFields,
)

native = extension.native

pytestmark = [
    pytest.mark.skipif(native is None, reason=extension.missing),
    pytest.mark.one_interceptor,
]

HEADER = Path(__file__).parents[1] / "src/amanda_driver_torch/native/fields.h"
#: Class -> the lists of its fields in the header.
LISTS: dict[type[Any], tuple[str, ...]] = {
    WatchFields: ("AMANDA_WATCH_FIELDS", "AMANDA_WATCH_GIVEN_ON"),
    ProgramFields: ("AMANDA_PROGRAM_FIELDS",),
    GradientFields: ("AMANDA_GRADIENT_FIELDS",),
}


@pytest.mark.parametrize("kind", LISTS, ids=lambda kind: kind.__name__)
def test_the_fields_are_those_of_the_header(kind: type[Any]) -> None:
    text = HEADER.read_text("utf-8").replace("\\\n", "")
    listed: list[str] = []
    for name in LISTS[kind]:
        (line,) = re.findall(rf"#define {name}\(FIELD\)(.*)", text)
        listed += re.findall(r"FIELD\((\w+), \w+\)", line)
    assert sorted(listed) == sorted(field.name for field in dataclasses.fields(kind))


def fields_of(kind: type[Any], **values: Any) -> Any:
    made: Any = object.__new__(kind)
    for field in dataclasses.fields(kind):
        setattr(made, field.name, values.get(field.name))
    return made


@pytest.mark.parametrize("make", [native.Program, native.Watch] if native else [])
def test_an_object_without_a_field_is_refused(make: Any) -> None:
    with pytest.raises(AttributeError, match="'object' object has no attribute"):
        make(object())


def test_a_field_of_another_type_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match="the field execution cannot be a list"):
        native.Program(fields_of(ProgramFields, execution=[]))
    with pytest.raises(TypeError, match="the field execute cannot be a NoneType"):
        native.Watch(fields_of(WatchFields))
