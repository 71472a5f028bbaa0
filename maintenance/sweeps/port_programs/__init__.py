"""Networks and ports of them to other frameworks and classes, in which mistakes can be planted.

Each module has the original, `ours`, its `port`, and the `PLANTS` that the port understands. As a
program it runs one: `python -m maintenance.sweeps.port_programs.mlp ours`, or `port`, or
`port KIND LAYER` with a mistake.
"""
