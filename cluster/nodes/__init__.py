"""The nodes of a cluster as pure decisions: states, leases and placement."""
