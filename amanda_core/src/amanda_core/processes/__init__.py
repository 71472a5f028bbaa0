"""Runs of several processes: which one this is, and how their results become one.

Nothing here communicates: what is known of other processes is in variables and files.
"""
