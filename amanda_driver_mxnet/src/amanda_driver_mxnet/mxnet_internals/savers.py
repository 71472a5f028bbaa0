"""Functions of MXNet that write or read a model, by name."""

from __future__ import annotations

__all__ = ["QUIET_FUNCTIONS", "WRITERS"]

_READERS = ("load", "load_frombuffer")
#: Module -> functions that write nothing for other programs; `mxnet.ndarray` has them, too.
QUIET_FUNCTIONS: dict[str, tuple[str, ...]] = {
    "mxnet.ndarray.utils": _READERS,
    "mxnet.ndarray": _READERS,
    "mxnet.numpy_extension.utils": ("load",),
    "mxnet.gluon.block": (
        "Block.load_parameters",
        "Block.load_params",
        "Block.load",
        "SymbolBlock.imports",
    ),
    "mxnet.gluon.parameter": ("ParameterDict.load", "ParameterDict.load_dict"),
    "mxnet.gluon.trainer": ("Trainer.save_states", "Trainer.load_states"),
    "mxnet.model": ("load_params", "load_checkpoint"),
}
#: Module -> a function that writes the model for other programs -> what it is called there.
WRITERS = {
    "mxnet.ndarray.utils": {"save": "mxnet.nd.save"},
    "mxnet.ndarray": {"save": "mxnet.nd.save"},
    "mxnet.numpy_extension.utils": {"save": "mxnet.npx.save"},
    "mxnet.gluon.block": {
        "Block.save_parameters": "save_parameters",
        "Block.save_params": "save_params",
        "Block.save": "save",
        "HybridBlock.export": "export",
    },
    "mxnet.gluon.parameter": {"ParameterDict.save": "ParameterDict.save"},
    "mxnet.model": {"save_checkpoint": "mxnet.model.save_checkpoint"},
}
