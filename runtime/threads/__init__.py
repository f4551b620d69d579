"""What waits: the event loop, the lock that detects re-entry, a blocking call with a timeout."""
