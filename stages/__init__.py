"""The stages: each a module, `python -m stages.<name> key=value`, whose inputs and outputs dvc.yaml names."""

import pipeline as pipeline  # before torch: it sets variables that torch reads at import
