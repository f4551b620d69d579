"""A read-only page of a running driver: its trees, groups, ranks and deaths, live."""
