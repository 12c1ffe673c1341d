"""The pure core: events and `now` in, effects out. No I/O, no asyncio, no clock, no randomness."""
