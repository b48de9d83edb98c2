"""Typed configuration: one tree per run, YAML in, dotted overrides, unknown keys refused with the nearest name."""
