"""The rank group as pure decisions: its state, its events and actions, and what follows."""
