"""The JAX driver of Amanda.

`plugin` is what Amanda finds. Nobody imports this package: it does not import JAX before a tool is
applied.
"""
