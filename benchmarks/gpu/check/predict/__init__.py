"""What the check on a GPU is to measure, written down before: modelled on a virtual GPU, and by the simulator.

Importing this package needs neither torch nor Megatron.
"""

from benchmarks.gpu.check.predict.file import DEVICES, committed, hash_of, read_prediction

__all__ = ["DEVICES", "committed", "hash_of", "read_prediction"]
