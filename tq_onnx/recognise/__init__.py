"""Find the attention layers of a decoder, whatever exporter made it."""
