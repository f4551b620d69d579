"""Remote ranks of a group: their ZeroMQ links, nodes and output."""
