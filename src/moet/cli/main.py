"""`moet`: finds the command, and turns moet's own errors into one clear line and an exit code."""

import os
import sys
from importlib import import_module

import typer
from rich.console import Console

import moet
from moet.errors import MoetError

# command -> (module, function): imported only when asked for, so that `moet pack` never waits for the engine's imports.
COMMANDS = {
    "serve": ("moet.cli.serve", "serve"),
    "pack": ("moet.cli.pack", "pack"),
    "verify": ("moet.cli.verify", "verify"),
    "inspect": ("moet.cli.inspect", "inspect"),
    "cache": ("moet.cli.cache", "app"),
    "eval": ("moet.cli.eval", "app"),
}


def build_app(only: str | None = None) -> typer.Typer:
    """The typer app with every command, or with one of them."""
    app = typer.Typer(
        name="moet",
        help="Mixture-of-Experts models that do not fit, served by an unmodified vLLM.",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
    )

    @app.callback()
    def root() -> None: ...

    for name, (module, attribute) in COMMANDS.items():
        if only in (None, name):
            target = getattr(import_module(module), attribute)
            if isinstance(target, typer.Typer):
                app.add_typer(target, name=name)
            else:
                settings = {"allow_extra_args": True} if name == "serve" else {}
                app.command(name, context_settings=settings)(target)
    return app


def one_line(text: str) -> str:
    """A message may quote a file or tensor name with control characters in it."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def main() -> None:
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # a path may hold bytes that the terminal's encoding lacks
    arguments = sys.argv[1:]
    if arguments in (["--version"], ["-V"]):
        print(f"moet {moet.__version__}")
        return
    try:
        build_app(arguments[0] if arguments and arguments[0] in COMMANDS else None)()
    except MoetError as e:
        console = Console(stderr=True, soft_wrap=True, highlight=False)
        console.print(f"moet: {one_line(str(e))}", style="bold red", markup=False)
        sys.exit(e.exit_code)
    except BrokenPipeError:  # who reads our output has left
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
