"""A folder, checkpoint or pack, as what `moet.forward` reads; a pack's experts come from its rows."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from blake3 import blake3
from torch import nn

from moet.checkpoint import Checkpoint, ExpertWeights, LocalSource, TensorInfo, read_header
from moet.checkpoint.index import read_index, read_json
from moet.checkpoint.reader import Reader, Span
from moet.errors import EvalError
from moet.eval.subject import Card
from moet.forward import Decoder
from moet.layout import check_row, dequantize_row, unpack_row
from moet.models import spec_of
from moet.pack import Pack, fingerprint
from moet.pack.manifest import NAME


class PackView:
    """A pack's dense tensors and its model, under the names of `Checkpoint`. It has no experts of a checkpoint: `fill` sets them from rows."""

    def __init__(self, root: Path) -> None:
        self.pack = Pack.open(root)
        self.root, self.config = root, read_json(root / "config.json")
        self._shard_of = read_index(LocalSource(root))
        self.spec = spec_of(self.config, self._shard_of.keys())
        self.dense = self._shard_of.keys()
        self.dense_shards = tuple(sorted(set(self._shard_of.values())))
        self._headers = {shard: read_header(root / shard) for shard in self.dense_shards}
        self._reader = Reader()

    def dense_names(self, shard: str) -> list[str]:
        return list(self._headers[shard])

    def shard_of(self, name: str) -> str:
        return self._shard_of[name]

    def tensor_info(self, name: str) -> TensorInfo:
        return self._headers[self._shard_of[name]][name]

    def read(self, name: str) -> np.ndarray:
        info = self.tensor_info(name)
        return self._reader.read([Span(info.file, info.offset, info.nbytes)])[0]

    def experts(self, layer: int) -> Iterator[ExpertWeights]:
        return iter(())


def is_pack(folder: Path) -> bool:
    return (folder / NAME).is_file()


def open_view(folder: Path) -> Checkpoint | PackView:
    """Raises PackError or CheckpointError, as opening either does."""
    return PackView(folder) if is_pack(folder) else Checkpoint.open(folder)


def decoder_of(view: Checkpoint | PackView, device: str) -> Decoder:
    return Decoder.open(view, device=device, dtype=torch.float32)  # type: ignore[arg-type]


def fill(decoder: Decoder, module: nn.Module, view: Checkpoint | PackView, layer: int, precision: str) -> None:
    """Sets a loaded layer's routed experts from a pack's rows, exact values rounded to float32. Nothing to do for a checkpoint: loading did it.
    Raises EvalError if a row's checksum does not hold."""
    if not isinstance(view, PackView) or layer not in view.pack.layers:
        return
    rows = view.pack.layers[layer].rows(precision)
    size = rows.geometry.row_bytes
    with open(rows.path, "rb") as file:
        for expert in range(rows.experts):
            file.seek(rows.offset(expert))
            row = np.frombuffer(file.read(size), np.uint8)
            if bad := check_row(rows.geometry, row):
                raise EvalError(f"{rows.path}, expert {expert}: expected checksums that hold, found {bad[0]} damaged; run `moet verify {view.root} --repair SRC`")
            values = [torch.from_numpy(np.ascontiguousarray(m)) for m in dequantize_row(rows.geometry, row)]
            decoder.set_experts(module, expert, *values)
            if rows.geometry.biased:
                _fill_biases(module, expert, [m.bias for m in unpack_row(rows.geometry, row)])


def _fill_biases(layer: nn.Module, expert: int, biases: list[np.ndarray]) -> None:
    from moet.forward.experts import FusedExperts, _halves

    fused = FusedExperts.of(layer)
    gate, up, down = (torch.from_numpy(b) for b in biases)
    with torch.no_grad():
        first, second = _halves(fused.module.gate_up_proj_bias[expert], fused.interleaved)
        first.copy_(gate)
        second.copy_(up)
        fused.module.down_proj_bias[expert].copy_(down)


def card_of(folder: Path, view: Checkpoint | PackView, precision: str) -> Card:
    """fingerprint: what a pack has in `moet.json`; of a checkpoint, what a pack made of it would have, computed from all of its bytes. A checkpoint that cannot be packed
    (float32 experts) has its experts digested as plain tensors."""
    details: dict[str, Any] = {"architecture": view.spec.architecture, "max_model_len": _positions(view.config)}
    if isinstance(view, PackView):
        rows = next(iter(view.pack.layers.values())).rows(precision)
        details |= {"rows": rows.geometry.format, "pack_digest": view.pack.manifest.digest}
        return Card("pack", str(folder), f"{precision}, float32 activations", view.pack.fingerprint, details)
    if is_plain(view):
        names: Iterable[str] = view.names
        details["experts"] = ", ".join(sorted({view.tensor_info(n).dtype for n in view.names if n not in view.dense}))
        layers = []
    else:
        names = view.dense
        details["experts"] = ", ".join(sorted({view.native_format(layer.index) for layer in view.spec.layers}))
        layers = [(x.index, fingerprint.layer(fingerprint.expert(e) for e in view.experts(x.index))) for x in view.spec.layers]
    whole = fingerprint.whole(fingerprint.names(view.config, view.names), layers, [_digest(view, n) for n in names])
    return Card("checkpoint", str(folder), "native, float32 activations", whole, details)


def _positions(config: dict[str, Any]) -> int | None:
    found = config.get("max_position_embeddings") or (config.get("text_config") or {}).get("max_position_embeddings")
    return found if isinstance(found, int) else None


def is_plain(view: Checkpoint | PackView) -> bool:
    """Whether this is a checkpoint with float32 or float16 experts, which transformers loads and packing does not."""
    if isinstance(view, PackView):
        return False
    experts = sorted(set(view.names) - set(view.dense), key=lambda n: ("scale" in n, n))
    return view.tensor_info(experts[0]).dtype in ("F32", "F16")


def _digest(checkpoint: Checkpoint, name: str) -> fingerprint.TensorDigest:
    info = checkpoint.tensor_info(name)
    return fingerprint.TensorDigest(name, info.dtype, tuple(info.shape), blake3(memoryview(checkpoint.read(name))).hexdigest())
