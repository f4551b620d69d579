"""Finds ranks that hang and says what they are doing."""
