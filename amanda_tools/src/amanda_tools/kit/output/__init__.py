"""Forms of results: tables, pages, trace files, folders, and the packages that some need."""
