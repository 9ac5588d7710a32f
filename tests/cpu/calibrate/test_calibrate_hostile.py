"""Calibration on what nobody should give it: it refuses by name, or gives the bytes of an undisturbed run."""

import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from calibrate_cases import SOURCES, pack_calibrated
from safetensors.torch import save_file

from moet.calibrate import stored
from moet.calibrate.encoder import CalibratedEncoder
from moet.calibrate.open import open_encoder
from moet.calibrate.tokens import read_file
from moet.cli.pack import scheme_of
from moet.errors import CheckpointError, ConfigError, PackError, QuantizeError
from moet.forward import States
from moet.quantize.schemes import DEFAULT_SCHEME
from tests.cpu.pack_cases import contents

WORDS = "All work and no play makes Jack a dull boy. " * 1000


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    root = tmp_path_factory.mktemp("hostile")
    SOURCES["mixtral"](root / "src")
    pack_calibrated(root / "src", root / "dst")
    return root


class Stopped(BaseException):
    """As a kill, for the packer: nobody catches it."""


def half_packed(made, dst: Path, monkeypatch) -> Path:
    """Stopped before the last layer; returns the file of the states before it."""
    real = CalibratedEncoder._calibrated

    def calibrated(self, layer):
        if layer.index == 2:
            raise Stopped
        return real(self, layer)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(CalibratedEncoder, "_calibrated", calibrated)
        pack_calibrated(made / "src", dst)
    (found,) = (dst / stored.FOLDER).iterdir()
    return found


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 0x41
    path.write_bytes(data)


def other(path: Path, tensors: dict, metadata: dict | None) -> None:
    save_file(tensors, path, metadata=metadata)


DAMAGE = {
    "a flipped bit of a state": lambda p: flip(p, -5),
    "NaN": lambda p: p.write_bytes(p.read_bytes()[:-4] + b"\x00\x00\xc0\x7f"),
    "cut off": lambda p: p.write_bytes(p.read_bytes()[:-100]),
    "empty": lambda p: p.write_bytes(b""),
    "no metadata": lambda p: other(p, {"full": torch.zeros(6, 32, 64)}, None),
    "no digest": lambda p: other(p, {"full": torch.zeros(6, 32, 64)}, {"carries": "-1"}),
    "nothing in it": lambda p: other(p, {}, {"carries": "x"}),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_damaged_states_are_computed_again(damage, made, tmp_path, monkeypatch):
    path = half_packed(made, tmp_path / "dst", monkeypatch)
    damage(path)
    pack_calibrated(made / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_a_damaged_row_of_a_finished_layer(made, tmp_path, monkeypatch):
    half_packed(made, tmp_path / "dst", monkeypatch).unlink()
    row = tmp_path / "dst" / "experts" / "base-001.safetensors"
    flip(row, len(row.read_bytes()) // 2)
    with pytest.raises(PackError, match=r"base-001.safetensors, expert \d: expected checksums that hold.*Delete the file"):
        pack_calibrated(made / "src", tmp_path / "dst")
    row.unlink()
    pack_calibrated(made / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")


def test_states_are_of_their_tokens(tmp_path):
    ids = torch.arange(6).reshape(2, 3)
    states = States(ids, torch.randn(2, 3, 4), (None, torch.tensor([True, False])))
    (tmp_path / ".moet").mkdir()
    stored.write(tmp_path, stored.Streams(3, states, states))
    found = stored.read(tmp_path, 3, ids)
    assert found.same and found.full.hidden.equal(states.hidden)
    assert found.full.carry[0] is None and found.full.carry[1].equal(states.carry[1])
    assert stored.read(tmp_path, 3, ids + 1) is None


def test_no_space_for_states(made, tmp_path, monkeypatch):
    def full(*_, **__):
        raise stored.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    with monkeypatch.context() as patch, pytest.raises(PackError, match="states, found: .*No space left.*make room"):
        patch.setattr(stored, "save_file", full)
        pack_calibrated(made / "src", tmp_path / "dst")
    pack_calibrated(made / "src", tmp_path / "dst")
    assert contents(tmp_path / "dst") == contents(made / "dst")


def damaged(src: Path, name: str, value: float) -> None:
    """Sets the first element of every tensor that ends in `name`."""
    from safetensors.torch import load_file

    for shard in src.glob("*.safetensors"):
        tensors = load_file(shard)
        for key in tensors:
            if key.endswith(name):
                tensors[key].flatten()[0] = value
        save_file(tensors, shard)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("layers.1.block_sparse_moe.experts.2.w1.weight", float("nan"), "layer 1, expert 2, gate, row 0, column 0: .* found nan"),
        ("layers.1.block_sparse_moe.experts.3.w3.weight", float("inf"), "layer 1, expert 3, up, row 0, column 0: .* found inf"),
        ("layers.1.block_sparse_moe.experts.2.w2.weight", float("nan"), "layer 1, expert 2, down, row 0, column 0"),
        ("layers.1.block_sparse_moe.experts.2.w1.weight", 3e38, "layer 1, experts 0 to 3, down: expected statistics"),
        ("layers.1.input_layernorm.weight", float("nan"), "layer 1, inputs of its experts in the full network"),
        ("layers.1.block_sparse_moe.gate.weight", float("nan"), "layer 1, router weights of its experts"),
    ],
)  # fmt: skip
def test_damaged_weights_are_named(name, value, message, tmp_path):
    SOURCES["mixtral"](tmp_path / "src")
    damaged(tmp_path / "src", name, value)
    with pytest.raises(QuantizeError, match=message):
        pack_calibrated(tmp_path / "src", tmp_path / "dst")


BAD_LINES = [
    "[]", "5", "null", '{"text": 5}', '{"text": "\\ud800"}', '{"messages": []}', '{"messages": {"role": "user"}}', '{"messages": [{"content": "a"}]}',
    '{"messages": [{"role": "user", "content": 5}]}', '{"messages": [{"role": "user", "content": "\\ud800"}]}', '{"messages": [{"role": "user", "content": "a"}], "tools": {"a": 1}}',
    '{"messages": [{"role": "user", "content": "a"}], "tools": [5]}', "[" * 100_000, '{"text": "a',
]  # fmt: skip


@pytest.mark.parametrize("line", BAD_LINES, ids=lambda line: line[:40])
def test_a_bad_line_is_named(line, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text(f'{{"text": "good"}}\n{line}\n')
    with pytest.raises(ConfigError, match="bad.jsonl, line 2: expected a"):
        read_file(file)


def test_lines_end_where_json_says(tmp_path):
    file = tmp_path / "a.jsonl"
    file.write_text('\ufeff{"text": "a\u2028b\u0085c"}\r\n{"text": "d"}\n', "utf-8")
    assert [d.text for d in read_file(file)] == ["a\u2028b\u0085c", "d"]


def open_on(src: Path, *files: Path):
    return open_encoder(src, DEFAULT_SCHEME, files, 2048, "cpu")


def test_a_file_without_text_is_named(made, tmp_path):
    (tmp_path / "words.txt").write_text(WORDS)
    (tmp_path / "empty.txt").write_text("")
    with pytest.raises(ConfigError, match=r"at least 1024 tokens in .*empty.txt, found less; leave it out"):
        open_on(made / "src", tmp_path / "words.txt", tmp_path / "empty.txt")


@pytest.mark.parametrize("template", ["{{ 1 / 0 }}", "{% if %}", "{{ messages[99].role.x }}", "{% for m in messages %}"])
def test_a_broken_chat_template_leaves_the_words(template, tmp_path):
    SOURCES["mixtral"](tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    message = {"role": "user", "content": [{"type": "text", "text": WORDS}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps({"messages": [message]}) + "\n")
    (tmp_path / "words.txt").write_text("user: " + WORDS)
    chat, words = (open_on(tmp_path, tmp_path / name) for name in ("chats.jsonl", "words.txt"))
    assert chat.windows.digest == words.windows.digest


@pytest.mark.parametrize("name, text", [("tokenizer_config.json", "[]"), ("tokenizer.json", "{}"), ("tokenizer.json", "\x00")])
def test_a_damaged_tokenizer(name, text, tmp_path):
    SOURCES["mixtral"](tmp_path)
    (tmp_path / name).write_text(text)
    with pytest.raises(CheckpointError, match="expected a tokenizer that transformers reads, found: .*; `--no-calibrate`"):
        open_on(tmp_path)


def changed(src: Path, **values) -> None:
    path = src / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def test_another_model_s_tokenizer(tmp_path):
    SOURCES["mixtral"](tmp_path)
    changed(tmp_path, vocab_size=100)
    with pytest.raises(CheckpointError, match="expected a tokenizer of the 100 tokens that config.json says, found token"):
        open_on(tmp_path)


def test_a_checkpoint_that_names_its_layers_otherwise(tmp_path):
    SOURCES["mixtral"](tmp_path / "src")
    changed(tmp_path / "src", model_type="martian")
    with pytest.raises(CheckpointError, match="block_sparse_moe.*: expected MixtralForCausalLM to have it"):
        pack_calibrated(tmp_path / "src", tmp_path / "dst")


def test_text_that_nobody_would_read():
    with pytest.raises(ConfigError, match="--calibration: expected no text beside --no-calibrate, found a.txt"):
        scheme_of(None, False, [Path("a.txt")])
