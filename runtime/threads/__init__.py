"""What waits: the event loop and the lock that detects re-entry."""
