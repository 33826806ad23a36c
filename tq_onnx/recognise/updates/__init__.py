"""Find how new rows get into a cache."""
