"""Private names of ONNX Runtime stand in one package of the driver only."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy
import onnxruntime
from onnxruntime.capi import onnxruntime_inference_collection as collection

from amanda_core.testing.checks.private_names import DriverSources, has_underscore
from amanda_driver_onnxruntime.onnxruntime_internals.sessions import ENTRY_POINTS

from .models import conv_net
from .onnxruntime_backends import options

OWNER = "onnxruntime_internals/"


@functools.cache
def sources() -> DriverSources:
    session = onnxruntime.InferenceSession(conv_net().SerializeToString(), options())
    number = onnxruntime.OrtValue.ortvalue_from_numpy(numpy.zeros(1))
    things = (session, session.io_binding(), number, onnxruntime.SessionOptions(), collection)
    theirs = frozenset(name for thing in things for name in dir(thing) if has_underscore(name))
    package = Path(__file__).parents[1] / "src/amanda_driver_onnxruntime"
    return DriverSources(package, "onnxruntime", has_underscore, theirs)


def test_private_names_stand_in_their_owner_only() -> None:
    others = [name for name in sources().texts if not name.startswith(OWNER)]
    assert [line for name in others for line in sources().mentions(name)] == []
    owners = ("sessions", "bindings", "values")
    assert all(sources().mentions(f"{OWNER}{name}.py") for name in owners)


def test_one_that_is_planted_is_found() -> None:
    planted = "\ndef f(a): return a._sess, a._model_path\n"
    name = "attachment.py"
    assert len(sources().mentions(name, sources().texts[name] + planted)) == 2


def test_what_is_replaced_is_there() -> None:
    for owner, name in ENTRY_POINTS:
        assert callable(vars(owner)[name])
