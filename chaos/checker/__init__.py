"""Whether a history is allowed: the invariants and their violations."""
