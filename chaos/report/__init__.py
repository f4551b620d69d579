"""Reports of a run: result, timeline, page."""
