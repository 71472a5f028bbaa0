"""The pluggy plugin of ONNX Runtime's driver, named by the entry point ``amanda.drivers``.

It does not import the framework, so that programs that do not use it do not wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from amanda_core.driver_kit import DeclaredHooks, ModelFile, Session
from amanda_core.interface import Attachment, hookimpl
from amanda_driver_onnxruntime.vocabulary import DECLARATIONS, describe

__all__ = ["HOOKS"]


def _attachment() -> Callable[[Session], Attachment]:
    from amanda_driver_onnxruntime.attachment import OrtAttachment

    return OrtAttachment


class _Hooks(DeclaredHooks):
    @hookimpl
    def amanda_exported(self, model: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Export a session, or a model of ONNX; return None for what is neither."""
        if not self.is_loaded():
            return None
        from amanda_driver_onnxruntime.attachment import exported

        return exported(model, args, kwargs)

    @hookimpl
    def amanda_model_file(self, path: str) -> ModelFile | None:
        """Open a file that is named as ONNX's are."""
        if not path.endswith(".onnx"):
            return None
        from amanda_driver_onnxruntime.model_files import OnnxFile

        return OnnxFile(path)


HOOKS = _Hooks(DECLARATIONS, describe, _attachment)
