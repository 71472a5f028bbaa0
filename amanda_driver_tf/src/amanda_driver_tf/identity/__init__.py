"""Which op a call is, and what names it: call sites, layers, variables, namespaces."""
