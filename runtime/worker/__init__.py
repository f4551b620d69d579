"""The worker process around the user's object: main loop, control socket, replies, termination."""
