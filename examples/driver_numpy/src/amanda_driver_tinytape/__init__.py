"""Amanda's driver for tinytape: an example of a whole driver, written against public names only.

`plugin` is what the entry point names; `attachment` intercepts operators; `vocabulary` translates.
"""
