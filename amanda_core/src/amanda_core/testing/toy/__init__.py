"""A toy framework in plain Python and its driver, with which the conformance kit is tested."""
