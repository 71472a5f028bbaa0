"""Amanda's driver for MXNet: imperative arrays and hybridized Gluon blocks.

The entry point names `plugin`. Only `mxnet_internals` uses MXNet's private names.
"""
