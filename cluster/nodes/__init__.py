"""The nodes of a cluster as pure decisions: states, leases, and which ranks they get."""
