"""Plan, rewrite and check the conversion of a recognised decoder."""
