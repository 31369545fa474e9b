"""Stagecoach: a code assistant of one's own, trained stage by stage as a DVC graph."""

import os

# Read when torch is loaded. At warnings, c10d prints a C++ stack when machine 0 leaves the exit barrier first, which is
# no fault; what is one is raised, and said once by who knows it.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
# OpenMP threads that wait without spinning: with other work on the cores, spinning ones made training five times
# slower.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
