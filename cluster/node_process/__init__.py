"""The process on a node that starts its ranks, ends them, keeps its lease, and its starter."""
