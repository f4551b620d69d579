"""What users declare: the worker class, options, layout; and the values that they are given."""
