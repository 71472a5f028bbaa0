"""MindSpore's private names, as of MindSpore 2.10.

Owns every use of a name with an underscore, of MindSpore's C++ classes and of its modules that are
not documented. It decides nothing about tools.
"""

#: The version with which these names were checked.
CHECKED = "2.10.0"
