"""Run models and measure inner values: probes, divergence, errors of cache rows."""
