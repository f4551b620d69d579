"""What groups on several machines take: calls, deaths, cuts, and what nodes cost."""
