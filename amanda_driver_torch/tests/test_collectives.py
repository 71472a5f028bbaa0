"""Collectives of torch.distributed write the tensors that they were given, even if tools edit."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import amanda
from amanda_core.testing.kit.tools import Everywhere
from amanda_driver_torch import interceptor


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


@pytest.mark.usefixtures("group")
def test_they_are_no_operators_and_listed_as_not_seen() -> None:
    seen = []
    tool = amanda.Tool()
    tool.add_inst_for_op(lambda context: seen.append(context.op_type))
    with amanda.apply(tool):
        dist.all_reduce(torch.ones(2))
    assert seen == ["ones"]
    assert "collectives of torch.distributed" in {gap.what for gap in interceptor().limits}
