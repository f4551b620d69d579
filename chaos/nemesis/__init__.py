"""The faults of a run: their catalogue, their schedule, and their injection."""
