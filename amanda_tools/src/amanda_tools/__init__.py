"""The tools that come with Amanda, each an entry point of the group ``amanda.tools``.

A tool depends on the core alone; what is specific to a framework imports it where it is used.
"""

from __future__ import annotations

__version__ = "0.1.0"
