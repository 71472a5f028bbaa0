"""Op ids, which are the same in every process, and stable positions of call sites.

Owns how an id is made from the key of an op, and which part of a frame's position does not change
while a program runs.
"""

from __future__ import annotations

import dis
import functools
import sys
from array import array
from collections.abc import Hashable
from types import CodeType

__all__ = ["call_offset", "call_offsets", "stable_id"]

# The opcode of inline caches in compiled code.
_CACHE = dis.opmap["CACHE"]
# In 3.11 some builtins are called from this instruction. CALL follows this many bytes later.
_PRECALL = dis.opmap.get("PRECALL") if sys.version_info[:2] == (3, 11) else None
_TO_CALL = 4


@functools.lru_cache(maxsize=65536)
def stable_id(key: Hashable) -> int:
    """Return a number of 63 bits that depends only on the printed form of the key.

    >>> stable_id(("conv1", 3)) == stable_id(("conv1", 3))
    True
    """
    # It loads OpenSSL, a twentieth of the time that `import amanda` takes. Many tools read no id.
    import hashlib

    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def call_offsets(code: CodeType) -> array[int]:
    """Return the offsets of a code object's calls, indexed by ``f_lasti // 2`` of its frames.

    When code becomes warm, CPython makes some calls from another place of the same instruction:
    ``a[b]`` of a Python class from the end of the instruction's cache, and in 3.11 some builtins
    from the instruction before CALL. By ``f_lasti`` alone, one call site would look like two.

    Returns:
        Offsets in bytes, as C ints.

    >>> offsets = call_offsets((lambda a: a[0]).__code__)
    >>> len(set(offsets)) < len(offsets)
    True
    """
    instructions = code.co_code
    return array("i", [call_offset(instructions, at) for at in range(0, len(instructions), 2)])


def call_offset(instructions: bytes, offset: int) -> int:
    """Return the one of `call_offsets` that belongs to an ``f_lasti``.

    Args:
        instructions: ``co_code`` of the frame's code.
        offset: ``f_lasti`` of the frame.
    """
    while offset > 0 and instructions[offset] == _CACHE:
        offset -= 2
    return offset + (_TO_CALL if instructions[offset] == _PRECALL else 0)
