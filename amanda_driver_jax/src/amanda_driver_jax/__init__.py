"""The JAX driver of Amanda.

It is found through the entry point ``amanda.drivers``. Users need not import anything from here.
"""
