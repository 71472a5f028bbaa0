"""Which op a call is: module scopes, call sites, weights."""
