"""The worker side: runs the user's object."""
