"""What a run says about itself: one metric schema, sinks, timers, progress, plots. Only rank 0 writes."""
