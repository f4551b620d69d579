"""Memory that processes share: arena, mappings, budget and locks."""
