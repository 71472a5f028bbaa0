"""Give each test of the suite every backend that the command line names."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from amanda_core.testing.kit.fixtures import rig_of
from amanda_core.testing.kit.rig import Rig
from amanda_core.testing.plugin import backends_of


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Make one case for each backend."""
    if "rig" not in metafunc.fixturenames:
        return
    if not metafunc.config.pluginmanager.has_plugin("amanda_core.testing.plugin"):
        raise pytest.UsageError("Run the suite with -p amanda_core.testing.plugin")
    backends = backends_of(metafunc.config)
    if not backends:
        raise pytest.UsageError("Say --amanda-backend=module:Name, a Backend of the driver to test")
    metafunc.parametrize("rig", backends, indirect=True, ids=lambda backend: backend.title)


@pytest.fixture
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    """Return the rig of a test: its backend, and helpers around it."""
    yield from rig_of(request.param, request)
