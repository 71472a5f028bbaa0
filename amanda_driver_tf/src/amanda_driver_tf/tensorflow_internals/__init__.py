"""Every private name of TensorFlow that this driver uses.

All of `tensorflow.python` is private, and so are attributes with a leading underscore. Only this
package uses such names, so that a new version of TensorFlow is checked against one package. The
rest of the driver imports from here. Public names of the modules (such as ``context.eager_mode``)
are used through `modules`.

| module | owns |
|---|---|
| `modules` | the modules of `tensorflow.python` that are used |
| `entry_points` | functions and methods that are replaced, by owner and name |
| `originals` | the replaced functions of the eager mode, callable in any case |
| `tapes` | C++ functions about tapes, and whether a thread executes eagerly |
| `objects` | attributes of graphs, ops, tensors, functions and sessions |
| `names` | names in definitions of graphs, and of modules whose frames are skipped |
| `graph_checks`, `eager_checks` | the tests that the names which the modes depend on exist |
| `versions`, `extension` | the tested versions; the driver's extension, made for them |
"""
