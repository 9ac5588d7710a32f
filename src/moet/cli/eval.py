"""`moet eval`: quality against a reference, standard tasks, and reports of both."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from moet.errors import EvalError

app = typer.Typer(help="Measures what a model's answers differ in from a reference's; docs/eval.md says what each number is.", no_args_is_help=True)

Precision = Annotated[str, typer.Option(help="rows that a candidate pack is read with: base or native")]
KeyFile = Annotated[Path | None, typer.Option(help="servers: file with their API key")]
Out = Annotated[Path, typer.Option("--out", help="result file, JSON")]


@contextlib.contextmanager
def stages(console: Console) -> Iterator[Callable[[str, int], Callable[[], None]]]:
    """A bar a stage, with the time left; on a stream that is no terminal, the stages' names."""
    columns = (TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TimeRemainingColumn(compact=True))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bars:

        def stage(what: str, count: int) -> Callable[[], None]:
            task = bars.add_task(what, total=count)
            if not console.is_terminal:
                console.print(f"moet: {what}, {count}", markup=False, highlight=False)
            return lambda: bars.advance(task)

        yield stage


@app.command()
def compare(
    reference: Annotated[str, typer.Argument(help="http://HOST:PORT, a checkpoint folder, or a pack")],
    candidate: Annotated[str, typer.Argument(help="the same three")],
    text: Annotated[list[str], typer.Option(help="FILE or DOMAIN=FILE: text, or a JSON line a document; repeat it for more")],
    out: Out,
    prompts: Annotated[Path | None, typer.Option(help="JSON lines with messages (tools, schema) or prompt: answered greedily by both")] = None,
    precision: Precision = "base",
    reference_precision: Annotated[str, typer.Option(help="the same for a reference that is a pack")] = "native",
    short: Annotated[int, typer.Option(help="number of short windows")] = 64,
    long: Annotated[int, typer.Option(help="number of long windows")] = 12,
    short_bytes: Annotated[int, typer.Option(help="UTF-8 bytes of a short window")] = 512,
    long_bytes: Annotated[int, typer.Option(help="UTF-8 bytes of a long window")] = 4096,
    decode: Annotated[int, typer.Option(help="short windows that also go through the decode path")] = 16,
    answers: Annotated[int, typer.Option(help="greedy answers, at most")] = 64,
    max_tokens: Annotated[int, typer.Option(help="of an answer")] = 64,
    loss: Annotated[float, typer.Option(help="loss that the gates should be able to catch, as a share")] = 0.02,
    seed: Annotated[int, typer.Option(help="of the windows' order, the resampling, a server's own text")] = 0,
    top: Annotated[int, typer.Option(help="compare so many tokens of each distribution by name, the rest as one; 0: the whole vocabulary")] = 0,
    max_kl: Annotated[float | None, typer.Option(help="gate: leave with 1 if a path's KL is above this, in nats a token")] = None,
    stream: Annotated[bool, typer.Option(help="folders: one layer in memory at a time; prefill only")] = False,
    device: Annotated[str, typer.Option(help="folders: where transformers runs: cpu, cuda")] = "cpu",
    tokenizer: Annotated[str, typer.Option(help="servers: folder of their tokenizer, where theirs is not on this machine")] = "",
    model: Annotated[str, typer.Option(help="servers: the served name, where there are several")] = "",
    key_file: KeyFile = None,
) -> None:
    """KL, agreement, bits per byte, greedy divergence, validity and length of a candidate against a reference that differs in its routed experts only."""
    need("scipy", "jsonschema", "torch", "transformers")
    from moet.eval import prompts as prompt_files
    from moet.eval import report, result
    from moet.eval import text as texts
    from moet.eval.compare import compare as run
    from moet.eval.parameters import Parameters
    from moet.eval.subject import open_subject

    parameters = Parameters(short_bytes, long_bytes, short, long, decode, answers, max_tokens, loss, seed, top)
    result.reserve(out, *(Path(spec.rpartition("=")[2]) for spec in text), *map(Path, text), *([prompts] if prompts else []))
    asked = prompt_files.read(prompts) if prompts else []
    console = Console(stderr=True, soft_wrap=True)
    more = {"tokenizer": tokenizer, "device": device, "stream": stream, "model": model, "top": top, "seed": seed, "key": key_of(key_file)}
    with contextlib.ExitStack() as open_:
        a = open_subject(reference, precision=reference_precision, **more)
        open_.callback(a.close)
        b = open_subject(candidate, precision=precision, **more)
        open_.callback(b.close)
        documents = texts.read(text, texts.rendering(a.tokenizer))
        stage = open_.enter_context(stages(console))
        found = run(a, b, documents, asked, parameters, stage, max_kl)
    result.write(out, found)
    report.show([(out.stem, found)], Console(soft_wrap=True))
    if any(claim["held"] is False for claim in found["claims"]):
        raise typer.Exit(1)


@app.command()
def tasks(
    url: Annotated[str, typer.Argument(help="http://HOST:PORT of the server")],
    tasks: Annotated[str, typer.Option(help="names of lm-eval's tasks, with commas")],
    out: Out,
    chat: Annotated[bool, typer.Option(help="through chat completions; tasks that need log-probabilities cannot")] = False,
    limit: Annotated[int | None, typer.Option(help="documents a task, the first ones", min=1)] = None,
    num_fewshot: Annotated[int | None, typer.Option(help="examples before each question; the task's own number by default")] = None,
    concurrent: Annotated[int, typer.Option(help="requests in flight", min=1)] = 8,
    include: Annotated[Path | None, typer.Option(help="folder with tasks of your own")] = None,
    tokenizer: Annotated[str, typer.Option(help="folder or Hub id, where the server's own files are not on this machine")] = "",
    model: Annotated[str, typer.Option(help="the served name, where there are several")] = "",
    loss: Annotated[float, typer.Option(help="loss that the gate should be able to catch, as a share")] = 0.02,
    key_file: KeyFile = None,
) -> None:
    """Standard tasks by lm-eval, against any OpenAI-compatible server; every document's outcome is kept, so that two results can be compared in pairs."""
    need("lm_eval", "tenacity", "scipy")
    from moet.eval import report, result
    from moet.eval.tasks import run

    asked = {"chat": chat, "limit": limit, "num_fewshot": num_fewshot, "concurrent": concurrent, "include": include, "loss": loss}
    result.reserve(out)
    found = run(url, [name for name in map(str.strip, tasks.split(",")) if name], tokenizer=tokenizer, model=model, key=key_of(key_file), **asked)
    result.write(out, found)
    report.show([(out.stem, found)], Console(soft_wrap=True))


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="result files of compare and tasks; two of tasks are also compared in pairs, the first being the reference")],
    markdown: Annotated[bool, typer.Option(help="tables as Markdown")] = False,
    pictures: Annotated[Path | None, typer.Option(help="folder for SVG pictures")] = None,
) -> None:
    """Tables and pictures of results."""
    from moet.eval import report as reports
    from moet.eval import result

    found = [(path.stem, result.read(path)) for path in results]
    for path, one in zip(results, found, strict=True):
        with whole(str(path)):
            reports.tables([one])
    if sum(r["kind"] == "tasks" for _, r in found) == 2:
        need("scipy")
    with whole(", ".join(map(str, results))):
        if pictures:
            need("matplotlib")
            from moet.eval.pictures import draw

            for path in draw(found, pictures):
                Console(stderr=True).print(str(path), markup=False, highlight=False)
        if markdown:
            print(reports.markdown(found), end="")
        else:
            reports.show(found, Console(soft_wrap=True))


@contextlib.contextmanager
def whole(name: str) -> Iterator[None]:
    """Raises EvalError where a result lacks what every result has: it was cut, or edited."""
    try:
        yield
    except (KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        raise EvalError(f"{name}: expected a whole result of `moet eval`, found one that lacks something: {type(e).__name__}: {e}; measure again") from None
    except OSError as e:
        raise EvalError(f"--pictures: expected a folder that can be written, found: {e.strerror} ({e.filename})") from None


def key_of(path: Path | None) -> str:
    """Raises EvalError if the file cannot be read. The key itself goes into no result and no message."""
    try:
        return path.read_text().strip() if path else ""
    except (OSError, UnicodeDecodeError) as e:
        raise EvalError(f"--key-file {path}: expected a readable file, found: {type(e).__name__}") from None


def need(*modules: str) -> None:
    """Raises EvalError that says how to install what is missing."""
    from importlib.util import find_spec

    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise EvalError(f"moet eval: expected {', '.join(missing)}, found none; install with: pip install 'moet[eval]'")
