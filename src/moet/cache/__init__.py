"""What is kept where: the bookkeeping of slots (its specification is `reference`, the native twin runs in the
store), and heat on disk."""

from moet.cache.heat import load_heat, save_heat
from moet.cache.reference import Bookkeeping, Step

__all__ = ["Bookkeeping", "Step", "load_heat", "save_heat"]
