"""The ranks of each system: what they train, and what they note. They need torch and no phalanx."""
