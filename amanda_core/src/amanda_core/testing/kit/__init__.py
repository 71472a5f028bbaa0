"""The parts of the conformance kit: backends, models, oracles, and the programs that it runs."""
