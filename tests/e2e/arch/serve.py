"""A pack through vLLM in a process of its own, and the same model through transformers.

    python -m tests.e2e.arch.serve PACK OUT.json [base native]

writes greedy tokens and their log-probabilities for fixed prompts. vLLM keeps global state, so one process serves one pack.
"""

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

PROMPTS = [[5 + (i * i * 31 + 7 * i) % 900 for i in range(start, start + length)] for start, length in ((0, 13), (40, 37))]
NEW_TOKENS = 12
PRECISIONS = ("base", "native")
RAM_PERCENT = 60
"""Of the experts' bytes: 40 % of the rows are always on disk, so serving pages."""

ENVIRONMENT = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1",
               "VLLM_LOGGING_LEVEL": "ERROR", "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}


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


def serve(pack: Path, out: Path, precisions: tuple[str, ...] = PRECISIONS, timeout: float = 600) -> dict[str, Answers]:
    """Runs this module as a process. Raises RuntimeError with the end of its log if it fails."""
    command = [sys.executable, "-m", "tests.e2e.arch.serve", str(pack), str(out), *precisions]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, env=os.environ | ENVIRONMENT, cwd=root, capture_output=True, text=True, timeout=timeout, check=False)
    if done.returncode or not out.exists():
        raise RuntimeError(f"{' '.join(command[1:])}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
    return {name: Answers(**answers) for name, answers in json.loads(out.read_text()).items()}


def compare(folder: Path, answers: Answers) -> Agreement:
    """`folder`: an unquantized float32 checkpoint, read by transformers with eager attention."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    same = count = 0
    difference = gap = 0.0
    for prompt, tokens, logprobs in zip(PROMPTS, answers.tokens, answers.logprobs, strict=True):
        with torch.no_grad():
            wanted = model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1].double().log_softmax(-1)
        chosen = wanted[range(len(tokens)), tokens]
        same += int((wanted.argmax(-1) == torch.tensor(tokens)).sum())
        count += len(tokens)
        difference = max(difference, float((chosen - torch.tensor(logprobs, dtype=torch.float64)).abs().max()))
        gap = max(gap, float((wanted.max(-1).values - chosen).max()))
    return Agreement(same, count, difference, gap)


def _main(pack: str, out: str, *precisions: str) -> None:
    from vllm import LLM, SamplingParams

    answers = {}
    for precision in precisions or PRECISIONS:
        settings = {"precision": precision, "ram_percent": RAM_PERCENT, "heat_dir": str(Path(out).with_suffix(".heat"))}
        llm = LLM(model=pack, dtype="float32", max_model_len=512, enforce_eager=True, kv_cache_memory_bytes=134217728, max_num_seqs=8, seed=0,
                  skip_tokenizer_init=True, additional_config={"moet": settings})
        sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=1, detokenize=False)
        done = llm.generate([{"prompt_token_ids": p} for p in PROMPTS], sampling, use_tqdm=False)
        tokens = [list(d.outputs[0].token_ids) for d in done]
        values = [[step[t].logprob for t, step in zip(d.outputs[0].token_ids, d.outputs[0].logprobs, strict=True)] for d in done]
        answers[precision] = {"tokens": tokens, "logprobs": values}
        llm.llm_engine.engine_core.shutdown()
        del llm
    Path(out).write_text(json.dumps(answers))


if __name__ == "__main__":
    _main(*sys.argv[1:])
