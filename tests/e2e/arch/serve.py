"""A pack through vLLM in a process of its own, and the same model through transformers.

    python -m tests.e2e.arch.serve OUT NAME=PACK ...

writes OUT/NAME.json: greedy tokens and their log-probabilities for fixed prompts, by precision.
"""

import json
import os
import subprocess
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

LENGTHS = (13, 37)
NEW_TOKENS = 12
PRECISIONS = ("base", "native")
RAM_PERCENT = 60
"""Of the experts' bytes: 40 % of the rows are always on disk, so serving pages."""

ENVIRONMENT = {
    "TRITON_INTERPRET": "1",
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}


def prompts(model: Path) -> list[list[int]]:
    """Token ids for a model folder, two prompts of LENGTHS; ids 0 to 4 are special."""
    vocabulary = json.loads((model / "config.json").read_text())["vocab_size"]
    return [[5 + (i * i * 31 + 7 * i) % (vocabulary - 5) for i in range(n, 2 * n)] for n in LENGTHS]


@dataclass(frozen=True)
class Answers:
    """Per prompt: the greedy tokens, and the log-probability the engine gave each."""

    tokens: list[list[int]]
    logprobs: list[list[float]]


@dataclass(frozen=True)
class Agreement:
    """Engine against reference, teacher-forced on the engine's tokens. `same`: how many tokens are the reference's argmax, of
    `tokens`; `logprob`: largest difference of a chosen token's log-probability; `gap`: the largest amount by which the reference
    preferred another token (0 if it never did)."""

    same: int
    tokens: int
    logprob: float
    gap: float

    def holds(self, tolerance: float) -> bool:
        """Log-probabilities agree, and every token is the reference's best or as good as it within twice the tolerance."""
        return self.logprob <= tolerance and self.gap <= 2 * tolerance


def serve(packs: dict[str, Path], out: Path, timeout: float = 600) -> dict[str, dict[str, Answers] | str]:
    """Serves each pack in base and native, all in one process (importing vLLM takes longer than a tiny model does).

    `out`: a folder for the answers. Returns, by the name of each pack, answers by precision, or how it failed: a failure does
    not keep the others from being served, and an answer that is already in `out` is taken as it is.
    """
    out.mkdir(parents=True, exist_ok=True)
    root = Path(__file__).resolve().parents[3]
    failed: dict[str, str] = {}
    while left := [name for name in packs if name not in failed and not (out / f"{name}.json").exists()]:
        command = [
            sys.executable,
            "-m",
            "tests.e2e.arch.serve",
            str(out),
            *(f"{name}={packs[name]}" for name in left),
        ]
        try:
            done = subprocess.run(
                command,
                env=os.environ | ENVIRONMENT,
                cwd=root,
                capture_output=True,
                text=True,
                check=False,
                timeout=timeout * len(left),
            )
            log = (done.stdout + done.stderr)[-6000:]
        except subprocess.TimeoutExpired as e:
            log = f"no answer within {e.timeout:.0f} s"
        now = [name for name in left if not (out / f"{name}.json").exists()]
        if now:
            failed[now[0]] = (
                log  # the process stops at its first failure; the ones behind it get another process
            )
    return failed | {
        name: {p: Answers(**a) for p, a in json.loads((out / f"{name}.json").read_text()).items()}
        for name in packs
        if name not in failed
    }


def compare(folder: Path, answers: Answers, fp8_inputs: Collection[str] = ()) -> Agreement:
    """`folder`: an unquantized float32 checkpoint, read by transformers with eager attention. `fp8_inputs`: linear layers whose
    activations vLLM rounds to E4M3 with a scale per token, so the reference does too."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for name in fp8_inputs:
        model.get_submodule(name).register_forward_pre_hook(_round_inputs)
    same = count = 0
    difference = gap = 0.0
    for prompt, tokens, logprobs in zip(prompts(folder), answers.tokens, answers.logprobs, strict=True):
        with torch.no_grad():
            wanted = (
                model(torch.tensor([prompt + tokens]))
                .logits[0, len(prompt) - 1 : -1]
                .double()
                .log_softmax(-1)
            )
        chosen = wanted[range(len(tokens)), tokens]
        same += int((wanted.argmax(-1) == torch.tensor(tokens)).sum())
        count += len(tokens)
        difference = max(
            difference, float((chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max())
        )
        gap = max(gap, float((wanted.max(-1).values - chosen).max()))
    return Agreement(same, count, difference, gap)


def _round_inputs(module, inputs):
    import torch

    x = inputs[0]
    scale = x.abs().amax(-1, keepdim=True) / 448
    return ((x / scale).to(torch.float8_e4m3fn).to(x.dtype) * scale,)


def fp8_inputs(checkpoint: Path) -> list[str]:
    """The linear layers of a compressed-tensors checkpoint, routed experts left out, that have FP8 activations: those of which
    the file has a scale per row, as moet's experts take activations as they are."""
    config = json.loads((checkpoint / "config.json").read_text())
    groups = config.get("quantization_config", {}).get("config_groups", {})
    activations = [group.get("input_activations") or {} for group in groups.values()]
    if not any(a.get("strategy") == "token" and a.get("num_bits") == 8 for a in activations):
        return []
    last = config["num_hidden_layers"]
    names = []
    for file in sorted(checkpoint.glob("*.safetensors")):
        with file.open("rb") as f:
            header = json.loads(f.read(int.from_bytes(f.read(8), "little")))
        names += [
            name.removesuffix(".weight_scale")
            for name in header
            if name.endswith(".weight_scale") and ".mlp.experts." not in name
        ]
    return [name for name in names if int(name.split(".")[2]) < last]


def ram_percent(pack: Path) -> int:
    """RAM_PERCENT, or 100 for a fixture of so few experts that the pager's least number of slots, 4, is more than that."""
    rows = sum(layer["experts"] for layer in json.loads((pack / "moet.json").read_text())["layers"])
    return RAM_PERCENT if rows * RAM_PERCENT >= 400 else 100


def fill_router() -> None:
    """vLLM 0.32's CPU router asserts softmax where there are no expert groups, so it cannot route MiniMax-M2 (sigmoid and a
    correction bias). One group of all experts is the same routing, and that case it has."""
    from vllm.model_executor.layers.fused_moe.router import cpu_router

    stock = cpu_router.CPURouter._compute_routing

    def compute(self, hidden_states, router_logits, indices_type, *, input_ids=None):
        if (
            self.use_grouped_topk
            or self.scoring_func != "sigmoid"
            or self.custom_routing_function is not None
        ):
            return stock(self, hidden_states, router_logits, indices_type, input_ids=input_ids)
        return cpu_router._grouped_topk(
            gating_output=router_logits,
            topk=self.top_k,
            renormalize=self.renormalize,
            num_expert_group=1,
            topk_group=1,
            scoring_func="sigmoid",
            routed_scaling_factor=self.routed_scaling_factor,
            e_score_correction_bias=self.e_score_correction_bias,
        )

    cpu_router.CPURouter._compute_routing = compute


def _main(out: str, *packs: str) -> None:
    from vllm import LLM, SamplingParams

    fill_router()
    sampling = SamplingParams(
        temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False
    )
    for name, pack in (p.split("=", 1) for p in packs):
        answers = {}
        for precision in PRECISIONS:
            settings = {
                "precision": precision,
                "ram_percent": ram_percent(Path(pack)),
                "heat_dir": f"{out}/heat",
            }
            llm = LLM(
                model=pack,
                dtype="float32",
                max_model_len=512,
                enforce_eager=True,
                kv_cache_memory_bytes=134217728,
                max_num_seqs=8,
                seed=0,
                skip_tokenizer_init=True,
                additional_config={"moet": settings},
            )
            done = llm.generate(
                [{"prompt_token_ids": p} for p in prompts(Path(pack))], sampling, use_tqdm=False
            )
            tokens = [list(d.outputs[0].token_ids) for d in done]
            values = [
                [
                    step[t].logprob
                    for t, step in zip(d.outputs[0].token_ids, d.outputs[0].logprobs, strict=True)
                ]
                for d in done
            ]
            answers[precision] = {"tokens": tokens, "logprobs": values}
            llm.llm_engine.engine_core.shutdown()
            del llm
        Path(out, f"{name}.json").write_text(json.dumps(answers))


if __name__ == "__main__":
    _main(*sys.argv[1:])
