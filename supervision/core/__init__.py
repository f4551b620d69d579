"""The OTP supervisor as pure decisions: specs, messages, machine, restart rules and snapshot."""
