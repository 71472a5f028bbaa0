"""Tokens of tensors."""

from __future__ import annotations

from typing import Any

from amanda_driver_tf.identity.tokens import Tokens


class Tensor:
    """A tensor without a token."""

    _amanda_source: Any = 0


def test_a_finalizer_asks_for_a_token_while_all_are_released() -> None:
    # As TensorFlow's, which run operators that delete resources.
    tokens = Tokens()
    first, second, late = Tensor(), Tensor(), Tensor()

    class Resource:
        def __del__(self) -> None:
            tokens.of(late)

    for tensor in (first, second):
        tokens.of(tensor)
    first._amanda_source = Resource()
    tokens.release()
    assert not vars(first)
    assert not vars(second)
    assert tokens.find(tokens.of(late)) is late
