"""Which gRPC server the tests of the edges and of the whole gateway run on, unless a test says so itself.

`make test-grpcio` runs them all on the other one.
"""

import os

TRANSPORT = os.environ.get("RANKGATE_TEST_TRANSPORT", "fast")
