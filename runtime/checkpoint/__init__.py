"""Snapshots of a worker's state, in memory and on disk."""
