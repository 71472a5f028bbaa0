"""Which op a call is: call sites, modules, and the parameters that an operator reads."""
