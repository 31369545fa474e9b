"""The errors that a person can act on, and the exit code of each.

    StagecoachError                 exit 1
    ├── InputError (ValueError)     exit 2  an input is wrong: configuration, data, a model that does not fit
    │   ├── ConfigError                      params.yaml, conf/, the command line
    │   ├── DataError                        a data file or a record
    │   └── ModelError                       a checkpoint, a tokenizer, or two that do not belong together
    ├── SamplerError                exit 1   the engine that answers for a policy is gone, or answers something else
    └── GateError (RuntimeError)    exit 3   a health gate failed: the run would produce something wrong

Each message states what was expected, what was found, where, and what to do. `pipeline.run.stage.main` prints it
without a traceback. Any other exception is a defect of ours and keeps its traceback (exit 1).
"""


class StagecoachError(Exception):
    """Base of all errors below. Exit code 1."""

    exit_code = 1


class InputError(StagecoachError, ValueError):
    """A person's input is wrong. Exit code 2."""

    exit_code = 2


class ConfigError(InputError):
    """A value in `params.yaml`, in a file of `conf/`, or on the command line is wrong."""


class DataError(InputError):
    """A data file or a record is wrong; the message names file, line and field."""


class ModelError(InputError):
    """A model directory cannot be used here: another architecture, another tokenizer, damaged weights."""


class SamplerError(StagecoachError):
    """The engine that samples for a policy cannot be used any longer (rl/engine.py)."""


class GateError(StagecoachError, RuntimeError):
    """A health gate failed: the run would produce something wrong. Exit code 3."""

    exit_code = 3
