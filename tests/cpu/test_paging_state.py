"""state.py says the same bytes as state.cuh."""

import ctypes
import itertools

import pytest

from moet.kernels.paging import state
from tests.cpu.emulator.build import EmulatedModule

STRUCTS = [v for v in vars(state).values() if isinstance(v, type) and issubclass(v, ctypes.Structure)]
CONSTANTS = {
    "kMaxExperts": state.MAX_EXPERTS,
    "kMaxWaves": state.MAX_WAVES,
    "kMaxStaging": state.MAX_STAGING,
    "kMaxStrips": state.MAX_STRIPS,
    "kWorking": state.WORKING,
    "kFailedRow": state.FAILED_ROW,
    "kMailboxSize": state.MAILBOX_SIZE,
    "kFailedLocation": state.FAILED_LOCATION,
    "kCounters": len(state.COUNTERS),
    "kResolveThreads": state.RESOLVE_THREADS,
}


def asked() -> list[tuple[str, int]]:
    """C++ expressions and what they should be."""
    out = list(CONSTANTS.items())
    for name in state.COUNTERS:
        enumerator = "k" + "".join(part.title() for part in name.split("_"))
        out.append((enumerator, state.COUNTERS.index(name)))
    for struct in STRUCTS:
        out.append((f"sizeof({struct.__name__})", ctypes.sizeof(struct)))
        for name, _ in struct._fields_:
            field = getattr(struct, name)
            out.append((f"offsetof({struct.__name__}, {name})", field.offset))
            out.append((f"sizeof({struct.__name__}::{name})", field.size))
    return out


@pytest.fixture(scope="module")
def found() -> list[int]:
    expressions = ", ".join(f"static_cast<long long>({e})" for e, _ in asked())
    code = f'#include <cstddef>\nextern "C" void answers(long long* out) {{ for (const long long v : {{{expressions}}}) *out++ = v; }}'
    module = EmulatedModule(["paging/state.cuh", code])
    out = (ctypes.c_longlong * len(asked()))()
    module.library.answers(out)
    return list(out)


def test_sizes_offsets_and_constants(found):
    wrong = {e: (mine, theirs) for (e, mine), theirs in zip(asked(), found, strict=True) if mine != theirs}
    assert not wrong


@pytest.mark.parametrize("struct", STRUCTS, ids=lambda s: s.__name__)
def test_no_padding(struct):
    fields = [getattr(struct, name) for name, _ in struct._fields_]
    ends = [f.offset + f.size for f in fields]
    assert ends[:-1] == [f.offset for f in fields[1:]] and ends[-1] == ctypes.sizeof(struct)
    assert ctypes.sizeof(struct) % 8 == 0


def test_every_struct_has_its_twin(found):
    text = (EmulatedModule.__init__.__globals__["KERNELS"] / "paging" / "state.cuh").read_text()
    declared = {line.split()[1] for line in text.splitlines() if line.startswith("struct ")}
    assert declared == {s.__name__ for s in STRUCTS}
    fields = itertools.chain.from_iterable(s._fields_ for s in STRUCTS)
    assert all(name in text for name, _ in fields)
