"""Run models and read what happens inside: probes, divergence, caches against their rows."""
