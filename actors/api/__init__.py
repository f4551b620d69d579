"""`Executor`, its call methods, and executors as children of a supervisor."""
