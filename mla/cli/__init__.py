"""The command line ``mla``; each command lives in a module of its own."""

from __future__ import annotations

import sys

import typer

from mla.cli import doctor, explain
from mla.errors import MlaError

app = typer.Typer(
    help="Multi-head latent attention prefill: what it would run, and whether it can run here.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("explain")(explain.explain)
app.command("doctor")(doctor.doctor)


def main() -> None:
    """Run the command line; an error of the library becomes one line on stderr and exit status 2."""
    try:
        app()
    except MlaError as error:
        print(f"mla: {error}", file=sys.stderr)
        raise SystemExit(2) from None
