"""The rank group as pure decisions: its state, its events and its actions."""
