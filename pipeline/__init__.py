"""Stagecoach: train your own code assistant, stage by stage, as a DVC graph."""

import os

# PyTorch reads this variable when it is loaded. At level WARNING, c10d prints a C++ stack trace when machine 0 leaves
# the exit barrier first, which is harmless. Real errors raise exceptions and are reported where they are caught.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# Idle OpenMP threads sleep instead of spinning: when other programs used the cores, spinning made training five times
# slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
