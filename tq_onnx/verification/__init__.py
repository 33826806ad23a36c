"""Check the hard properties of a conversion against its original."""
