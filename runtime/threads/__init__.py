"""The event loop, and locks that detect re-entry."""
