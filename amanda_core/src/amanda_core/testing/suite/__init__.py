"""The suite: each module a side of the driver interface, each test one thing that a driver must do.

A test's docstring says what that is and by which call of the core a driver usually does it.
"""
