"""The fixture `rig` of the suite's tests, and the labels of their results for the report.

Owns set-up and tear-down of one test, for the suite's own conftest and the classes of
`conformance`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import pytest

from amanda_core.runtime.threads import THREAD
from amanda_core.testing.kit.backend import Backend
from amanda_core.testing.kit.capabilities import needs_of, reason_to_skip
from amanda_core.testing.kit.report import Subject
from amanda_core.testing.kit.rig import Rig

__all__ = ["PROPERTY", "rig_of"]

#: The key of the label in pytest's `user_properties`.
PROPERTY = "amanda_conformance"


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
        yield rig
        assert THREAD.session is None, "the test left tools applied"


def _name(request: pytest.FixtureRequest) -> str:
    """Return the test's name with its own parameters, without the backend's."""
    callspec = getattr(request.node, "callspec", None)
    own = [str(v) for name, v in callspec.params.items() if name != "rig"] if callspec else []
    return f"{request.function.__name__}[{'-'.join(own)}]" if own else request.function.__name__
