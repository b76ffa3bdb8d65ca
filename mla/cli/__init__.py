"""The command line ``mla``; each command lives in a module of its own."""

from __future__ import annotations

import sys

import typer

from mla.cli import bench, cache, check, compile, demo, doctor, explain, replay
from mla.errors import CompileError, MlaError, TargetError, UnsupportedError
from mla.logging import level_of_environment

app = typer.Typer(
    help="Multi-head latent attention prefill over paged caches. Start with: mla demo",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("demo")(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("explain")(explain.explain)
app.command("check")(check.check)
app.command("bench")(bench.bench)
app.command("compile")(compile.compile_)
app.command("replay")(replay.replay)
app.add_typer(cache.app, name="cache")


def main() -> None:
    """Run the command line; an error of the user's becomes one line and a hint on stderr, and exit status 2."""
    try:
        level_of_environment()  # a wrong one would otherwise be told by the first call alone
        app(prog_name="mla")
    except CompileError as error:  # the compiler's log says more than a line can
        print(f"mla: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    except (MlaError, OSError) as error:
        print(f"mla: {str(error).splitlines()[0]}", f"hint: {_hint(error)}", sep="\n", file=sys.stderr)
        raise SystemExit(2) from None


def _hint(error: Exception) -> str:
    if isinstance(error, UnsupportedError) and error.explanation is not None:
        why = error.explanation
        return f"`mla explain {why.op} --target {why.target}` shows every implementation with what speaks against it"
    if isinstance(error, TargetError):
        return "`mla doctor` shows what can run on this machine"
    return "`mla COMMAND --help` shows what each option takes"
