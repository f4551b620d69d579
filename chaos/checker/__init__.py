"""The check of a history: invariants and violations."""
