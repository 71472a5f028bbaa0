"""Fixtures that tests of programs of several processes share."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import found_by_ranks


@pytest.fixture(scope="module")
def found(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    """Run the test module as a program in `PROCESSES` processes; return what each has found."""
    program, processes = request.module.__file__, request.module.PROCESSES
    return found_by_ranks(program, processes, tmp_path_factory.mktemp("ranks"))
