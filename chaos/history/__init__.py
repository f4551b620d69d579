"""The history of a run: events, the files they are written to, and their index."""
