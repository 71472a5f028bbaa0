"""Weights: which parameters an operator reads, and what tools keep by parameter.

Owns nothing itself: `geometry` tells parts of a parameter, `parameters` finds them, `reads` is what
a context says of them, `state` what a tool keeps.
"""
