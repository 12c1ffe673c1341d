"""`make demo`: a gateway, four ranks and real traffic on loopback, from nothing to a summary."""
