"""The node process, which starts and ends ranks and keeps the node's lease, and its starter."""
