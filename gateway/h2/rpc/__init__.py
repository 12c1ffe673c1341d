"""gRPC over HTTP/2, as pure functions and buffers: heads of calls, messages, statuses.

https://github.com/grpc/grpc/blob/master/doc/PROTOCOL-HTTP2.md
"""
