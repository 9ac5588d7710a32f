"""What a long run tells whoever watches. The command line draws it; tests and programs may ignore it."""


class Progress:
    """Does nothing. Sizes are bytes of the source."""

    def start(self, total: int, done: int) -> None:
        """A run begins: `done` of `total` bytes are finished from an earlier run."""

    def advance(self, count: int) -> None:
        """`count` more bytes are packed. Called from one thread."""

    def stage(self, text: str) -> None:
        """What happens now, in a few words."""
