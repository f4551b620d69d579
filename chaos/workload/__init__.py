"""The client of a run: the target, and the generator of calls."""
