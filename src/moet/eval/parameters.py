"""What a comparison is asked for; all of it is written into the result."""

from dataclasses import dataclass

from moet.errors import EvalError


@dataclass(frozen=True)
class Parameters:
    """short_bytes, long_bytes: size of a window, in UTF-8 bytes of text. short, long: how many, the domains in turn. decode: how many of the short ones also go through the
    decode path, after half of their tokens as context. answers: prompts that are answered greedily, max_tokens long at most. loss: what the gates should be able to catch,
    as a share (0.02: 2 points). seed: of the windows' order, the resampling and a server's own text. top: tokens of each distribution that are compared by name, the rest as
    one; 0: the whole vocabulary."""

    short_bytes: int = 512
    long_bytes: int = 4096
    short: int = 64
    long: int = 12
    decode: int = 16
    answers: int = 64
    max_tokens: int = 64
    loss: float = 0.02
    seed: int = 0
    top: int = 0

    def __post_init__(self) -> None:
        for name, least in (("short_bytes", 16), ("long_bytes", 16), ("short", 0), ("long", 0), ("decode", 0), ("answers", 0), ("max_tokens", 1), ("top", 0)):
            if getattr(self, name) < least:
                raise EvalError(f"--{name.replace('_', '-')}: expected at least {least}, found {getattr(self, name)}")
        if not 0 < self.loss < 1:
            raise EvalError(f"--loss: expected a share between 0 and 1, found {self.loss}")
