"""Lets torchvision be imported beside a build of torch for which it has no kernels.

Its wheels need CUDA's libraries. Without them it registers functions for operators that do not
exist, and cannot be imported. Models need none of these operators.
"""

from __future__ import annotations

import torch

_SCHEMAS = {
    "nms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms": "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
}


def _define() -> torch.library.Library | None:
    try:
        import torchvision  # type: ignore[import-not-found]  # noqa: F401
    except RuntimeError:
        library: torch.library.Library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]
        for name, schema in _SCHEMAS.items():
            library.define(name + schema)  # type: ignore[no-untyped-call]
        return library
    except ImportError:
        pass
    return None


LIBRARY = _define()
