"""The suite: a module for each side of the driver interface, a test for each duty of a driver.

The docstring of a test says what a driver must do, and by which call of the core it usually does
it.
"""
