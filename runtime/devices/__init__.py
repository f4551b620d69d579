"""Which devices exist, which lease holds them, and whether they are well."""
