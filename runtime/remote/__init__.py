"""Ranks that are reached over ZeroMQ."""
