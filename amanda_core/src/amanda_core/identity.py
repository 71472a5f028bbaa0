"""Op ids: numbers made from what a driver says identifies an op, the same in every process."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Hashable

__all__ = ["stable_id"]


@functools.lru_cache(maxsize=65536)
def stable_id(key: Hashable) -> int:
    """A number of 63 bits that depends on nothing but the key's printed form.

    >>> stable_id(("conv1", 3)) == stable_id(("conv1", 3))
    True
    """
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
