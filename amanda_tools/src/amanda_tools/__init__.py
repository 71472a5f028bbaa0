"""Ready-made tools for Amanda, each registered in the entry-point group ``amanda.tools``.

The tools depend on the core alone. Code that needs a framework imports it where it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"
