"""What runs inside a worker process around the user's object."""
