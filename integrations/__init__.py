"""phalanx for other programs and engines; each needs an extra; the core imports none of them."""
