"""Coordinated snapshots of the state of ranks."""
