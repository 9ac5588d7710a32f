"""T1: the demo's server answers tool prompts with parsed tool calls. T2: its MTP head helps, in `native` and in `base`.

One server a precision, with MTP and the Hermes tool parser: the held-out tool prompts with `tool_choice: auto`, the held-out chats, and vLLM's own counters of drafts.
"""

import argparse
import json
import tempfile
from pathlib import Path

from common import DEMO, FLOAT32, MODE, RESULTS, ROOT, SEED_ENV, record, serving

MTP = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 1}')
TOOLS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "chat.json")
    parser.add_argument("--chats", type=int, default=20)
    options = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="moet-chat-"))
    rows = [json.loads(line) for line in (ROOT / "demo" / "heldout" / "prompts.jsonl").read_text().splitlines()]
    tools = [r for r in rows if r["kind"] == "tools"]
    chats = [r for r in rows if r["kind"] == "chat"][: options.chats]
    claims, samples = [], {}
    for precision in ("base", "native"):
        run = ("--precision", precision, "--ram", "25%", "--cache-dir", str(work / precision))
        with serving.moet(DEMO, *run, log=work / f"{precision}.log", vllm=(*FLOAT32, *MTP, *TOOLS), env=SEED_ENV) as server:
            greedy = {"temperature": 0, "max_tokens": 96}
            called = []
            for r in tools:
                body = {"messages": r["messages"], "tools": r["tools"], "tool_choice": "auto", **greedy}
                message = server.post("/v1/chat/completions", body)["choices"][0]["message"]
                called.append([(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in message.get("tool_calls") or []])
            said = [server.post("/v1/chat/completions", {"messages": r["messages"], **greedy})["choices"][0]["message"]["content"] for r in chats]
            drafts = server.metrics("vllm:spec_decode_")
        steps = drafts["vllm:spec_decode_num_drafts_total"]
        per_step = 1 + drafts["vllm:spec_decode_num_accepted_tokens_total"] / steps
        letter = {"base": "a", "native": "b"}[precision]
        what = f"`{precision}`: held-out tool prompts answered with a parsed tool call, through vLLM's Hermes parser"
        claims.append(record.Claim("T1" + letter, what, sum(map(bool, called)), f"of {len(tools)}", len(tools) - 1, ">="))
        claims.append(record.Claim("T2" + letter, f"`{precision}`: tokens a step with one MTP draft, greedy", round(per_step, 3), "", 1.5, ">="))
        samples[precision] = {"tool_calls": called, "chats": said, "drafts": drafts}
        print(claims[-2].value, claims[-1].value, flush=True)
    record.write(options.out, claims, samples, mode=MODE, chats=len(chats))


if __name__ == "__main__":
    main()
