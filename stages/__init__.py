"""Pipeline stages: one module each, run as `python -m stages.<name> key=value`; dvc.yaml lists inputs and outputs."""

import pipeline as pipeline  # before torch: sets environment variables that torch reads at import
