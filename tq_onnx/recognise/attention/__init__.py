"""Read the parts of attention that several dialects share."""
