"""One message: values to bytes, frames, the call socket, the page of progress."""
