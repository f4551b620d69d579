"""Runs recorded OTP scenarios on phalanx's supervisors and compares the traces."""
