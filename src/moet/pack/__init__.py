"""The pack: a model folder with rows of experts. `Pack.open` reads one, `pack` makes one, `verify` and
`repair` keep one right."""

from moet.pack.reader import LayerFiles, Pack, Rows

__all__ = ["LayerFiles", "Pack", "Rows"]
