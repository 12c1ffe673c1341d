"""Engine wire formats: pure codecs, bytes in and neutral types out. No sockets."""
