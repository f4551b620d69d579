"""Doing it: processes, descriptors, sockets and clocks."""
