"""report.json and loss.png out of what training and evaluation left behind."""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from config import ModelConfig

MODES = (("bf16", "native"), ("bf16_two_bit", "two_bit"), ("nvfp4", "native"), ("nvfp4_two_bit", "two_bit"))


def smooth(values: list[float], width: int = 15) -> list[float]:
    """Running mean over the last `width` values."""
    return [sum(values[max(0, i + 1 - width) : i + 1]) / min(i + 1, width) for i in range(len(values))]


def draw(history: dict, path: Path) -> None:
    """Training losses (left axis) and held-out bits per byte (right axis) over the tokens seen."""
    millions = [point[0] / 1e6 for point in history["curve"]]
    figure, axis = plt.subplots(figsize=(8, 4.5), dpi=110)
    for column, label in ((1, "next token"), (2, "token after next (MTP)")):
        axis.plot(millions, smooth([point[column] for point in history["curve"]]), label=label, linewidth=1.3)
    axis.set_xlabel("million tokens")
    axis.set_ylabel("training loss, nats a token")
    axis.set_ylim(1.4, 4.5)
    axis.grid(alpha=0.3)
    held_out = axis.twinx()
    held_out.plot(
        [p[0] / 1e6 for p in history["held_out"]],
        [p[1] for p in history["held_out"]],
        "k.--",
        linewidth=0.8,
        label="held-out text",
    )
    held_out.set_ylabel("held-out bits per byte")
    handles = axis.get_legend_handles_labels()[0] + held_out.get_legend_handles_labels()[0]
    axis.legend(
        handles, ["next token", "token after next (MTP)", "held-out text (right axis)"], loc="upper right"
    )
    figure.tight_layout()
    figure.savefig(path)


def collect(trained: Path, nvfp4: Path) -> dict:
    """The numbers of all four modes, and the run's facts."""
    history = json.loads((trained / "history.json").read_text())
    numbers = {
        "bf16": json.loads((trained / "numbers.json").read_text()),
        "nvfp4": json.loads((nvfp4 / "numbers.json").read_text()),
    }
    rounded = {
        mode: {
            k: round(v, 4) if isinstance(v, float) else v for k, v in numbers[mode.split("_")[0]][key].items()
        }
        for mode, key in MODES
    }
    c = ModelConfig()
    layers = [str(i) for i in range(c.dense_layers, c.layers)] + [f"{c.layers} (MTP)"]
    return {
        "steps": history["step"],
        "tokens": history["tokens"],
        "seconds": round(history["seconds"], 1),
        "tokens_per_second": round(history["tokens"] / history["seconds"]),
        "moe_layers": layers,
        "modes": rounded,
        "held_out_curve": [[tokens, round(value, 4)] for tokens, value in history["held_out"]],
        "loss_curve": history["curve"][::10],
    }


def main(trained: Path, nvfp4: Path, folder: Path) -> None:
    draw(json.loads((trained / "history.json").read_text()), folder / "loss.png")
    text = json.dumps(collect(trained, nvfp4), indent=1)
    (folder / "report.json").write_text(text + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "trained", type=Path, help="folder of the BF16 checkpoint with history.json and numbers.json"
    )
    parser.add_argument("nvfp4", type=Path, help="folder with numbers.json of the dequantized export")
    args = parser.parse_args()
    main(args.trained, args.nvfp4, Path(__file__).resolve().parent)
