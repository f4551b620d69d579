"""Tracing, the feed of observers, and the hooks of fault injection."""
