"""Callbacks for training loops of Keras, Lightning and transformers.

`run` applies the tools and logs their results, `libraries` adapts it to each library.
"""

from __future__ import annotations

from amanda_tools.training.libraries import callback

__all__ = ["callback"]
