"""What of TensorFlow is private and used by this driver, under names of its own.

All of `tensorflow.python` is private, and so are attributes with a leading underscore. Here is the
one place that imports from there and says such names, so a new version of TensorFlow is read about
in one package; the rest of the driver imports from it. Some public names of the modules (such as
``context.eager_mode``) are used by way of `modules`.

| module | owns |
|---|---|
| `modules` | the modules of `tensorflow.python` that are used |
| `entry_points` | functions and methods that are replaced, by owner and name |
| `tapes` | C++ functions about tapes, and the mode of a thread |
| `objects` | attributes of graphs, ops, tensors, functions and sessions |
| `names` | names in definitions of graphs, and of the modules whose frames are passed over |
| `graph_checks`, `eager_checks` | the tests that what the modes stand on is there |
"""
