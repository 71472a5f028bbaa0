"""The ground floor: threads and switches, weak references, containment, warnings, terminals.

Nothing here knows operators, tools or drivers.
"""
