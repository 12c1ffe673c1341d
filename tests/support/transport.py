"""Which gRPC server the tests of the edges and of the whole gateway run on, unless a test says so itself.

`RANKGATE_TEST_TRANSPORT=fast python -m pytest tests/edges tests/integration` runs them all on the other one.
"""

import os

TRANSPORT = os.environ.get("RANKGATE_TEST_TRANSPORT", "grpcio")
