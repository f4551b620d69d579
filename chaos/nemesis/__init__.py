"""What goes wrong in a run: the catalogue of faults, their schedule, and their injection."""
