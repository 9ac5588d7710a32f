"""The header reader accepts what safetensors writes, and refuses each kind of damage."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moet.checkpoint.reader import MAX_BUFFERS, Reader, Span
from moet.checkpoint.safetensors import DTYPE_BITS, MAX_HEADER_BYTES, read_header
from moet.errors import CheckpointError


def entry(begin: int, end: int, dtype: str = "U8", shape: list | None = None) -> dict:
    return {"dtype": dtype, "shape": [end - begin] if shape is None else shape, "data_offsets": [begin, end]}


def write(path: Path, header: object, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def test_reads_what_safetensors_writes(tmp_path):
    from safetensors.numpy import save_file

    arrays = {
        "b": np.arange(6, dtype=np.int32).reshape(2, 3),
        "a": np.ones((3, 1, 2), np.float16),
        "empty": np.zeros((0, 4), np.uint8),
        "scalar": np.float64(3),
    }
    save_file(
        {k: np.asarray(v) for k, v in arrays.items()}, tmp_path / "x.safetensors", metadata={"format": "pt"}
    )
    infos = read_header(tmp_path / "x.safetensors")
    assert set(infos) == set(arrays)
    spans = [Span(i.file, i.offset, i.nbytes) for i in infos.values()]
    for info, data in zip(infos.values(), Reader().read(spans), strict=True):
        assert info.shape == np.asarray(arrays[info.name]).shape
        assert data.tobytes() == np.asarray(arrays[info.name]).tobytes()
    assert [i.offset for i in infos.values()] == sorted(i.offset for i in infos.values())


def test_every_dtype_has_its_size(tmp_path):
    header, position = {}, 0
    for dtype, bits in DTYPE_BITS.items():
        header[dtype] = entry(position, position + bits, dtype, [8])
        position += bits
    infos = read_header(write(tmp_path / "x", header, bytes(position)))
    assert {i.dtype: i.nbytes for i in infos.values()} == DTYPE_BITS


def test_padded_header_and_metadata(tmp_path):
    text = json.dumps({"__metadata__": {"a": "b"}, "x": entry(0, 4)}).encode() + b"   "
    assert read_header(write(tmp_path / "x", text, bytes(4)))["x"].offset == 8 + len(text)


GOOD = {"x": entry(0, 4), "y": entry(4, 8)}
BAD = {
    "empty file": (b"", b"", None, "8 bytes"),
    "not JSON": (b"{x}", b"", None, "JSON"),
    "not UTF-8": (b'{"\xff": 1}', b"", None, "JSON"),
    "space before the object": (b' {"x": 1}', b"", None, "JSON object"),
    "a list": ([1], b"", None, "JSON object"),
    "metadata not strings": ({"__metadata__": {"a": 1}}, b"", None, "__metadata__"),
    "name twice": (b'{"x": {}, "x": {}}', b"", None, "duplicate key 'x'"),
    "length of 0": ({}, b"", 0, "length 0"),
    "length beyond the file": ({}, b"", 3, "length 3"),
    "length beyond the limit": ({}, b"", MAX_HEADER_BYTES + 1, f"length {MAX_HEADER_BYTES + 1}"),
    "length of 2**64 - 1": ({}, b"", 2**64 - 1, str(2**64 - 1)),
    "entry is no object": ({"x": 3}, b"", None, "tensor x"),
    "key missing": ({"x": {"dtype": "U8", "shape": [0]}}, b"", None, "tensor x"),
    "key too many": ({"x": entry(0, 0) | {"strides": [1]}}, b"", None, "tensor x"),
    "unknown dtype": ({"x": entry(0, 4, "INT4")}, bytes(4), None, "INT4"),
    "negative dimension": ({"x": entry(0, 4, shape=[-4])}, bytes(4), None, "shape"),
    "dimension is no integer": ({"x": entry(0, 4, shape=[4.0])}, bytes(4), None, "shape"),
    "dimension is true": ({"x": entry(0, 1, shape=[True])}, bytes(1), None, "shape"),
    "huge dimensions": ({"x": entry(0, 4, shape=[2**40, 2**40])}, bytes(4), None, "bytes"),
    "offsets descend": (
        {"x": {"dtype": "U8", "shape": [4], "data_offsets": [4, 0]}},
        bytes(4),
        None,
        "data_offsets",
    ),
    "three offsets": (
        {"x": {"dtype": "U8", "shape": [4], "data_offsets": [0, 4, 4]}},
        bytes(4),
        None,
        "data_offsets",
    ),
    "size is not shape times dtype": ({"x": entry(0, 4, "F32", [2])}, bytes(4), None, "8 bytes"),
    "odd number of 4-bit values": ({"x": entry(0, 1, "F4", [3])}, bytes(1), None, "1.5 bytes"),
    "hole": ({"x": entry(0, 4), "y": entry(5, 8)}, bytes(8), None, "hole"),
    "hole at the start": ({"x": entry(1, 4)}, bytes(4), None, "hole"),
    "overlap": ({"x": entry(0, 4), "y": entry(3, 8)}, bytes(8), None, "overlaps"),
    "same bytes twice": ({"x": entry(0, 4), "y": entry(0, 4)}, bytes(4), None, "overlaps"),
    "truncated": (GOOD, bytes(7), None, "bytes"),
    "bytes behind the data": (GOOD, bytes(9), None, "bytes"),
}


@pytest.mark.parametrize("case", BAD)
def test_malformed(case, tmp_path):
    header, data, length, word = BAD[case]
    path = tmp_path / "x.safetensors"
    path.write_bytes(b"") if case == "empty file" else write(path, header, data, length)
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert word in str(caught.value) and str(path) in str(caught.value) and "expected" in str(caught.value)


def test_good_header_next_to_the_bad_ones(tmp_path):
    assert list(read_header(write(tmp_path / "x", GOOD, bytes(8)))) == ["x", "y"]


def test_missing_file(tmp_path):
    with pytest.raises(CheckpointError, match="x.safetensors"):
        read_header(tmp_path / "x.safetensors")


@settings(max_examples=200)
@given(st.binary(max_size=200), st.integers(0, 2**64 - 1) | st.integers(0, 220))
def test_random_bytes_never_raise_anything_else(tmp_path_factory, data, length):
    path = tmp_path_factory.mktemp("fuzz") / "x"
    path.write_bytes(length.to_bytes(8, "little") + data)
    try:
        found = read_header(path)
    except CheckpointError:
        return
    assert found == {} and data[:length].rstrip() in (b"{}", b'{"__metadata__":{}}')


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 900), st.integers(0, 99)), max_size=30))
def test_spans_in_any_order_from_several_files(tmp_path_factory, picks):
    """Adjacent, repeated, overlapping and empty spans; each lands aligned in memory of its own."""
    folder = tmp_path_factory.mktemp("spans")
    content = [np.random.default_rng(n).integers(0, 256, 999, np.uint8).tobytes() for n in range(3)]
    for n, data in enumerate(content):
        (folder / str(n)).write_bytes(data)
    spans = [Span(folder / str(f), offset, size) for f, offset, size in picks]
    parts = Reader().read(spans)
    for (f, offset, size), part in zip(picks, parts, strict=True):
        assert part.tobytes() == content[f][offset : offset + size]
        assert size == 0 or part.ctypes.data % 64 == 0


def test_more_neighbours_than_one_call_takes(tmp_path):
    data = np.random.default_rng(0).integers(0, 256, 3 * (2 * MAX_BUFFERS + 5), np.uint8)
    (tmp_path / "x").write_bytes(data.tobytes())
    spans = [Span(tmp_path / "x", 3 * n, 3) for n in range(2 * MAX_BUFFERS + 5)]
    assert b"".join(p.tobytes() for p in Reader().read(spans)) == data.tobytes()


def test_neighbours_are_one_read(tmp_path, monkeypatch):
    import moet.checkpoint.reader as module

    (tmp_path / "x").write_bytes(bytes(100))
    calls, real = [], module.os.preadv
    monkeypatch.setattr(
        module.os, "preadv", lambda fd, buffers, at: calls.append(at) or real(fd, buffers, at)
    )
    Reader().read([Span(tmp_path / "x", 30, 10), Span(tmp_path / "x", 10, 20), Span(tmp_path / "x", 50, 5)])
    assert calls == [10, 50]


def test_short_reads_continue(tmp_path, monkeypatch):
    import moet.checkpoint.reader as module

    data = bytes(range(200))
    (tmp_path / "x").write_bytes(data)
    real = module.os.preadv
    monkeypatch.setattr(module.os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    parts = Reader().read([Span(tmp_path / "x", 0, 50), Span(tmp_path / "x", 50, 150)])
    assert b"".join(p.tobytes() for p in parts) == data


def test_end_of_file_is_named(tmp_path):
    (tmp_path / "x").write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match="expected at least 12 bytes, found 10"):
        Reader().read([Span(tmp_path / "x", 4, 8)])


def test_closing_frees_the_file_and_reading_opens_it_again(tmp_path):
    (tmp_path / "x").write_bytes(b"abc")
    reader = Reader()
    span = Span(tmp_path / "x", 0, 3)
    reader.read([span])
    (fd,) = reader._files.values()
    reader.close(tmp_path / "x")
    with pytest.raises(OSError):
        os.fstat(fd)
    assert reader.read([span])[0].tobytes() == b"abc"
