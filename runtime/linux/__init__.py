"""Linux primitives on the standard library alone; the guardian process runs on this room."""
