"""Checks of sources: layers of imports, private and public names, lines of code."""
