"""What a call, a death and a start cost here and elsewhere: ``python -m benchmarks``.

Every published figure comes from a command of this package, with the machine named beside it.
Systems that are compared are measured in the same run, in turns.
"""
