"""What a conversion changed: hard properties, quality and the report about both."""
