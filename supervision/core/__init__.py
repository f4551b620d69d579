"""The OTP supervisor as pure decisions: specs, messages, state and what follows from an event."""
