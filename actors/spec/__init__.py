"""Declarations by users (worker class, options, layout), and the values that they get back."""
