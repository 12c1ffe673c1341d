"""HTTP/2 (RFC 9113), the server's side, without I/O and without a clock: `Connection` is the whole interface."""
