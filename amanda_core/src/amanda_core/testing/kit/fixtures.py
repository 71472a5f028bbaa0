"""The fixture `rig` of the suite's tests, and the labels of their results for the report.

Owns set-up and tear-down of one test, for the suite's own conftest and the classes of
`conformance`, and the message if a driver sees no operator at all.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from amanda_core.engine.activation import apply
from amanda_core.engine.context import OpContext
from amanda_core.engine.tool import Tool
from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.backend import Backend
from amanda_core.testing.kit.capabilities import needs_of, reason_to_skip
from amanda_core.testing.kit.report import Subject
from amanda_core.testing.kit.rig import Rig

__all__ = ["PROPERTY", "rig_of"]

#: The key of the label in pytest's `user_properties`.
PROPERTY = "amanda_conformance"
#: Backend -> why its driver sees no operator; an empty string if it sees some.
_BLIND: weakref.WeakKeyDictionary[Backend, str] = weakref.WeakKeyDictionary()


def rig_of(backend: Backend, request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Yield the rig of one test; skip what is undeclared, and check that no tool stays applied."""
    with backend.registered():
        installed = backend.installed()
        needed = needs_of(request.function)
        subject = Subject(
            backend.title,
            backend.driver,
            installed.distribution,
            tuple(sorted(installed.info.capabilities_in(backend.mode))),
            dict(backend.without),
            # Plain strings: pytest-xdist cannot send a framework's subclass of str.
            {name: str(version) for name, version in backend.versions().items()},
        )
        label: dict[str, Any] = {
            "test": _name(request),
            "group": needed.group,
            "subject": asdict(subject),
            "namespaces": [],
        }
        request.node.user_properties.append((PROPERTY, label))
        reason = reason_to_skip(needed, backend, installed.info)
        if reason:
            pytest.skip(reason)
        rig = Rig(backend, installed.info, label["namespaces"])
        if backend not in _BLIND:
            _BLIND[backend] = why = _why_blind(Rig(backend, installed.info))
            if why:
                pytest.fail(why, pytrace=False)
        elif _BLIND[backend]:
            pytest.skip("no operator was seen, as the first test of this backend says")
        yield rig
        assert THREAD.session is None, "the test left tools applied"


def _why_blind(rig: Rig) -> str:
    """Return what to do if no operator of a model is seen under tools; else an empty string."""
    built = rig.build("chain")
    wanted = built.model.common_types
    seen: dict[str, None] = {}
    ours: list[OpContext] = []

    def analyse(context: OpContext) -> None:
        if rig.is_ours(context, wanted):
            ours.append(context)
        seen[f"{context.op_type} ({context.namespace}, in the zone {context.zone})"] = None

    tool = Tool()
    tool.add_inst_for_op(analyse)
    with contextlib.suppress(Exception), apply(tool):  # The tests show what is raised.
        built.run()
        if not ours:
            common, title = ", ".join(sorted(wanted)), rig.backend.title
            advice = (
                "Let the attachment replace what the functions in `Backend.functions` call, and "
                "call `Session.open` and `Session.analyse` there."
            )
            if seen:
                advice = (
                    f"Seen were {', '.join(seen)}. Map these names to the common types, in "
                    "`[types]` of driver.toml or in `DriverInfo.vocabulary`, and begin namespaces "
                    f"with {rig.backend.driver!r}."
                )
            return f"No operator of the types {common} was seen, which {title} ran. {advice}"
    return ""


def _name(request: pytest.FixtureRequest) -> str:
    """Return the test's name with its own parameters, without the backend's."""
    callspec = getattr(request.node, "callspec", None)
    own = [str(v) for name, v in callspec.params.items() if name != "rig"] if callspec else []
    return f"{request.function.__name__}[{'-'.join(own)}]" if own else request.function.__name__
