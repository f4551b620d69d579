"""Training through kills, beside what a user could use instead."""
