"""Identity: which op a call of an operator belongs to, and the number that it has.

`sites` owns the rule, and `identity` the numbers that are the same in every process.
"""
