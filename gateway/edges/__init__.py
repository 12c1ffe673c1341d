"""Edges: thin translations between the outside world and the core."""
