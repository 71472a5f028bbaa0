"""Functions that save and load a model use the same values as without tools."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import mxnet as mx
import numpy as np
import pytest
from mxnet import gluon

import amanda
from amanda_core.errors import AmandaWarning
from amanda_driver_mxnet import interception
from amanda_tools.prune import Prune
from amanda_tools.trace import Trace

X = np.random.RandomState(0).standard_normal((2, 6)).astype("float32")


def network() -> gluon.HybridBlock:
    mx.random.seed(1)
    net = gluon.nn.HybridSequential(prefix="net_")
    with net.name_scope():
        net.add(gluon.nn.Dense(5, activation="relu"), gluon.nn.Dense(4))
    net.initialize(mx.init.Xavier())
    net(mx.nd.array(X))
    return net


def values(net: gluon.Block) -> dict[str, Any]:
    return {name: one.data() for name, one in net.collect_params().items()}


def exported(net: gluon.HybridBlock, path: str) -> None:
    net.hybridize()
    net(mx.nd.array(X))
    net.export(path)


#: What programs call -> what writes a model to files that begin with a path.
SAVERS: dict[str, Callable[[Any, str], object]] = {
    "save_parameters": lambda net, path: net.save_parameters(path),
    "export": exported,
    "ParameterDict.save": lambda net, path: net.collect_params().save(path),
    "mxnet.nd.save": lambda net, path: mx.nd.save(path, values(net)),
    "mxnet.model.save_checkpoint": lambda net, path: mx.model.save_checkpoint(
        path, 1, net(mx.sym.var("data")), values(net), {}
    ),
}


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("called", SAVERS)
def test_a_saver_writes_the_model_as_it_is_and_warns_of_edits(called: str, tmp_path: Path) -> None:
    for name in ("plain", "looked", "edited"):
        (tmp_path / name).mkdir()
    SAVERS[called](network(), str(tmp_path / "plain" / "net"))
    with amanda.apply(Trace()):
        SAVERS[called](network(), str(tmp_path / "looked" / "net"))
    net, tool = network(), Prune(0.5)
    with amanda.apply(tool):
        net(mx.nd.array(X))
        with pytest.warns(AmandaWarning, match=f"^{called} writes the model without the changes"):
            SAVERS[called](net, str(tmp_path / "edited" / "net"))
    expected = files(tmp_path / "plain")
    assert expected
    assert files(tmp_path / "looked") == files(tmp_path / "edited") == expected


def test_operators_of_savers_and_readers_are_none_of_the_model(tmp_path: Path) -> None:
    net, path = network(), str(tmp_path / "net")
    tool = Trace(everything=True)
    with amanda.apply(tool):
        net.save_parameters(path)
        net.load_parameters(path)
        net.collect_params().save(path)
        assert [op.type for op in tool.result().ops] == []
        net(mx.nd.array(X))
    assert [op.type for op in tool.result().ops].count("FullyConnected") == 2


def test_an_error_of_a_saver_leaves_the_tools_applied(tmp_path: Path) -> None:
    net, tool = network(), Trace()
    with amanda.apply(tool):
        with pytest.raises(Exception, match="no-such-folder"):
            net.save_parameters(str(tmp_path / "no-such-folder" / "net"))
        net(mx.nd.array(X))
    assert tool.result().ops
    assert interception.ATTACHED == {}
    assert not hasattr(gluon.Block.save_parameters, "__wrapped__")
