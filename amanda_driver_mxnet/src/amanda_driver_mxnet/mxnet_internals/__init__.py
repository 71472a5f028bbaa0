"""MXNet's private names, as of MXNet 1.9.1, the last release of the archived project.

Owns every use of a name with an underscore, of the C library and of files inside MXNet. It decides
nothing about tools.
"""

#: The version with which these names were checked.
CHECKED = "1.9.1"
