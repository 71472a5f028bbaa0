"""Makes the installed packages win over the root folders of the same names.

pytest's importlib mode imports each parent of a test module's dotted name by its folder. For
`amanda_core/tests/test_x.py` it would register the folder `amanda_core` as an empty namespace
package, and so hide the real one. A package that is already imported is left alone.

And makes the tests hold where they run in the background: what a shell starts there is deaf to
Ctrl-C, and so would be the programs that the tests start and interrupt.
"""

import contextlib
import importlib
import signal

for _name in ("amanda_core", "amanda_driver_tf", "amanda_driver_torch", "amanda_tools"):
    # Whoever works on one member alone need not install the others.
    with contextlib.suppress(ModuleNotFoundError):
        importlib.import_module(_name)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
