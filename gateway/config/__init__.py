"""Configuration: one schema, one loader."""
