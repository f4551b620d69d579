"""What a run came to: result, timeline, page."""
