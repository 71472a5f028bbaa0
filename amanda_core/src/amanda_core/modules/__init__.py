"""Modules of a model: the calls of modules that run, and the paths of those that do not."""
