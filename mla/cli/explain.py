"""``mla explain``: which implementation serves an operation on a target, and why."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.text import Text

import mla
from mla.problem import OPS


def explain(
    op: Annotated[str, typer.Argument(help=f"One of {', '.join(OPS)}.")],
    target: Annotated[
        str, typer.Option(help="gpu, cuda, rocm, triton or cpu, with an architecture if wanted: rocm:gfx942.")
    ] = "gpu",
    dtypes: Annotated[str | None, typer.Option(help="Row of the dtype table: bf16, fp16, fp32, fp8, ...")] = None,
    page_size: Annotated[int | None, typer.Option(help="Tokens a page.")] = None,
    dims: Annotated[tuple[int, int] | None, typer.Option(help="q_depth and v_head_dim.")] = None,
    mask: Annotated[str | None, typer.Option(help="CausalMask or NullMask.")] = None,
    feature: Annotated[list[str] | None, typer.Option(help="lse, sinks, softcap, bias, ...; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show every implementation of OP on a target, with its reasons for and against.

    Works for hardware that is not here. Without options the problem is a DeepSeek-V3 step in bf16, pages of 64 tokens.
    Exit status 1 when nothing fits.

    Examples:

    - `mla explain prefill --target rocm:gfx942`
    - `mla explain gather --target cuda:sm_90a --dtypes fp8 --page-size 1`
    - `mla explain prefill --feature sinks --feature softcap --mask NullMask`
    """
    fields: dict[str, Any] = {
        "dtypes": dtypes,
        "page_size": page_size,
        "dims": dims,
        "mask": mask and _mask(mask),
        "features": feature,
    }
    answer = mla.explain(op, target=target, **{name: value for name, value in fields.items() if value is not None})
    if as_json:
        print(json.dumps(answer.to_dict(), indent=2))
    else:
        Console(soft_wrap=True).print(_coloured(str(answer)))
    raise typer.Exit(0 if answer.chosen else 1)


def _mask(name: str) -> object:
    from mla import masks

    known = ("CausalMask", "NullMask")
    if name not in known:
        raise mla.ArgumentError(f"mask: {name!r} is not one of {', '.join(known)}")
    return getattr(masks, name)()


def _coloured(text: str) -> Text:
    styles = {"- ": "red", "+ ": "green", "note: ": "dim"}
    result = Text()
    for line in text.splitlines(keepends=True):
        style = next((style for start, style in styles.items() if line.lstrip().startswith(start)), "")
        result.append(line, style)
    result.rstrip()
    return result
