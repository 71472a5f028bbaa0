"""Amanda's driver for MindSpore: PyNative mode, and compiled programs while a tool acts in them.

The entry point names `plugin`. Only `mindspore_internals` uses MindSpore's private names.
"""
