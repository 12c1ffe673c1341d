"""Developer commands: the demo and the generators."""
