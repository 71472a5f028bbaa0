"""Fixtures of the tests of TensorFlow programs."""

# mypy: allow-untyped-calls
# TensorFlow has no types.

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tensorflow as tf


@pytest.fixture
def as_written() -> Iterator[None]:
    """Turn off TensorFlow's graph optimizer, which fuses unobserved ops, which then round
    differently.
    """
    before = tf.config.optimizer.get_experimental_options()
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": True})
    yield
    off = before.get("disable_meta_optimizer", False)
    tf.config.optimizer.set_experimental_options({"disable_meta_optimizer": off})
