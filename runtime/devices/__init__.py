"""Devices: inventory, leases, release of memory, health and quarantine."""
