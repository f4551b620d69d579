"""The call plane: queue, send, receive, settle and recover calls."""
