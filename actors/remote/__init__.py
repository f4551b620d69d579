"""ZeroMQ links of ranks elsewhere."""
