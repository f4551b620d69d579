"""SIGINT, SIGTERM and the end of the driver process."""
