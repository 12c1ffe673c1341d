"""Several gateways on one host as one: a supervisor, and processes that share `listen.grpc` and nothing else."""
