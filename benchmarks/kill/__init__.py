"""What becomes of calls and machines when something is killed."""
