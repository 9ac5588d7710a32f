"""The expert store of a host: an arena of slots over the rows of a pack, filled by native I/O threads.
docs/pager.md explains it."""

from moet.store.counters import Counters
from moet.store.host import HostClass, HostStore, SlotLayout
from moet.store.pager import Pager, RowSource, SlotClass

__all__ = ["Counters", "HostClass", "HostStore", "Pager", "RowSource", "SlotClass", "SlotLayout"]
