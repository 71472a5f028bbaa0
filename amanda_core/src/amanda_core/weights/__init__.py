"""Weights: the parameters that operators read, and what tools keep for each.

`geometry` computes parts of parameters, `parameters` finds them, `reads` reports them to tools
through contexts, and `state` holds what a tool keeps for each.
"""
