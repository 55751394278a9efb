"""CUDA's connections from the host to a device, the queues in which launched work waits for its turn.

The driver reads their number from the environment when CUDA starts; a later change has no effect.
"""

import os

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
"""Environment variable with the number: 1 to 32, 8 if it is not set (CUDA Programming Guide, environment variables)."""
RECOMMENDED = 32
"""More than the streams of a rank, which would wait for each other in a shared queue."""


def has_one_connection() -> bool:
    """Whether all streams share one queue, in which work starts in the order of its launches."""
    return os.environ.get(CONNECTIONS) == "1"
