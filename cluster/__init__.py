"""Ranks on several machines: which machines there are, and which of them still run what."""
