"""moet's exception tree. Every message names the thing, what was expected, what was found, and the way out."""


class MoetError(Exception):
    """Base of all errors that moet raises on purpose. `exit_code` is what the command line leaves with."""

    exit_code = 1


class ConfigError(MoetError):
    """A setting is unknown, of a wrong type, out of range, or contradicts another one."""

    exit_code = 2


class CheckpointError(MoetError):
    """A source checkpoint is incomplete, damaged, or of an architecture or format that is not known."""


class QuantizeError(MoetError):
    """Weights cannot be encoded: not finite, or the result would be biased."""


class PackError(MoetError):
    """A pack cannot be written or read: locked, wrong version, wrong fingerprint, no space, damaged."""


class StoreError(MoetError):
    """Expert rows cannot be brought into memory: I/O error, checksum mismatch, budget too small."""


class EngineError(MoetError):
    """The engine (vLLM) is not the one this version supports, or was asked for what does not work yet."""


class EvalError(MoetError):
    """A comparison cannot be made: two different things, a server that does not say what is needed, or no text."""
