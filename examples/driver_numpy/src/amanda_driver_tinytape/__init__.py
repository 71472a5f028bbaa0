"""Amanda's driver for tinytape: an example of a complete driver, written with public names only.

The entry point names `plugin`. `attachment` intercepts operators, `identity` finds their ops,
`execution` and `gradients` execute plans, `facts` describes tensors, and `vocabulary` assigns
common operator types.
"""
