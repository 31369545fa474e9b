"""Errors the user can act on, and their exit codes.

    StagecoachError                 exit 1
    ├── InputError (ValueError)     exit 2  invalid input: configuration, data, an incompatible model
    │   ├── ConfigError                      params.yaml, conf/, the command line
    │   ├── DataError                        a data file or a record
    │   └── ModelError                       a checkpoint, a tokenizer, or a mismatched pair
    ├── SamplerError                exit 1   the policy's sampling engine has stopped or returns wrong answers
    └── GateError (RuntimeError)    exit 3   a health gate failed: the run would produce a wrong result

Each message states what was expected, what was found, where, and how to fix it. `pipeline.run.stage.main` prints it
without a traceback. Any other exception is a bug in this project and keeps its traceback (exit 1).
"""


class StagecoachError(Exception):
    """Base class of all errors below. Exit code 1."""

    exit_code = 1


class InputError(StagecoachError, ValueError):
    """The user's input is wrong. Exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    """A value in `params.yaml`, in a file under `conf/`, or on the command line is wrong."""


class DataError(InputError):
    """A data file or a record is wrong; the message names the file, line and field."""


class ModelError(InputError):
    """A model directory cannot be used here: different architecture, different tokenizer, corrupt weights."""


class SamplerError(StagecoachError):
    """The engine that samples for a policy is no longer usable (rl/engine.py)."""


class GateError(StagecoachError, RuntimeError):
    """A health gate failed: the run would produce a wrong result. Exit code 3."""

    exit_code = 3
