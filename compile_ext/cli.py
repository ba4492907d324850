"""The command line: ``compile-ext demo``, ``doctor``, ``tune``, ``warmup`` and ``verify``."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

app = typer.Typer(
    help="What serving engines hand-code per layer, for every model under torch.compile.",
    no_args_is_help=True,
)


class Model(str, Enum):
    """What the demo runs."""

    decoder = "decoder"
    smollm2 = "smollm2"


@app.command()
def demo(
    model: Annotated[
        Model,
        typer.Option(help="a small random decoder, or the real checkpoint SmolLM2-135M-Instruct"),
    ] = Model.decoder,
    verbose: Annotated[
        bool, typer.Option("--verbose", help="print every site, as explain does")
    ] = False,
) -> None:
    """Generate with eager, torch.compile and compile_ext; compare, and say what each pass did."""
    console = Console()
    if model is Model.decoder:
        from compile_ext.demo.run import run_decoder

        ok = run_decoder(console, verbose)
    else:
        from compile_ext.demo.smollm2 import run_smollm2

        ok = run_smollm2(console, verbose)
    raise typer.Exit(0 if ok else 1)


@app.command()
def doctor() -> None:
    """Say what this machine has of what the kernels need, and what to install."""
    from compile_ext.doctor import examine

    table = Table("", "found", "for", "")
    for x in examine():
        # As text: rich takes the brackets of "pip install 'compile-ext[cuda]'" for a style.
        table.add_row(*map(escape, (x.name, x.found or "-", x.use, x.reason or "ok")))
    Console().print(table)


@app.command()
def tune(
    op: Annotated[
        list[str] | None, typer.Option(help="an op to measure; repeatable (default: all it can)")
    ] = None,
    shape: Annotated[
        list[str] | None,
        typer.Option(help="N,K of a weight; repeatable (default: well-known ones)"),
    ] = None,
    tokens: Annotated[str | None, typer.Option(help="values of M, by commas")] = None,
    ship: Annotated[
        Path | None, typer.Option(help="write this file, to ship, and not the user's own table")
    ] = None,
) -> None:
    """Measure the kernels of each op on this GPU, and note which one is tried first."""
    from compile_ext.tune import command, operands

    console = Console()
    with _told(console):
        command.tune(
            console,
            op or list(operands.OPERANDS),
            [_shape(x) for x in shape] if shape else None,
            _numbers(tokens, "--tokens") if tokens else command.TOKENS,
            ship,
            shlex.join(["compile-ext", *sys.argv[1:]]),
        )


@app.command()
def warmup(
    manifest: Annotated[Path, typer.Argument(help="what Manifest.save has written")],
    max_tokens: Annotated[int, typer.Option(help="the largest M of a call")] = 8192,
    cache_dir: Annotated[
        Path | None, typer.Option(help="keep all that is compiled here, to pack and move")
    ] = None,
    jobs: Annotated[int | None, typer.Option(help="worker processes (default: what fits)")] = None,
    target: Annotated[
        str | None,
        typer.Option(help="sm_90, or the name of a GPU such as H200 (default: the one here)"),
    ] = None,
    budget_seconds: Annotated[float | None, typer.Option(help="begin no kernel after that")] = None,
    certificate: Annotated[
        Path | None, typer.Option(help="write what is on disk now, for compile-ext verify")
    ] = None,
    imports: Annotated[
        list[str] | None,
        typer.Option("--import", help="a module that registers ops and contracts; repeatable"),
    ] = None,
    strict: Annotated[bool, typer.Option("--strict", help="fail where one kernel fails")] = False,
) -> None:
    """Compile the kernels of a manifest: in an image build, without the model and its weights."""
    from compile_ext.warming import command

    console = Console()
    with _told(console):
        ok = command.warm(
            console,
            manifest,
            max_tokens=max_tokens,
            cache_dir=cache_dir,
            jobs=jobs,
            target=target,
            budget_seconds=budget_seconds,
            certificate=certificate,
            imports=imports or [],
            strict=strict,
        )
        raise typer.Exit(0 if ok else 1)


@app.command()
def verify(
    certificate: Annotated[Path, typer.Argument(help="what compile-ext warmup has written")],
    cache_dir: Annotated[
        Path | None, typer.Option(help="the folder that warmup was given (or a copy of it)")
    ] = None,
) -> None:
    """Compare the compiled kernels on disk, the versions and the GPU with a certificate."""
    from compile_ext.warming import command

    console = Console()
    with _told(console):
        raise typer.Exit(0 if command.verify(console, certificate, cache_dir) else 1)


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """An error of this package is its text, and status 1."""
    from compile_ext.ops.errors import CompileExtError

    try:
        yield
    except CompileExtError as error:
        console.print(str(error), style="red", soft_wrap=True, markup=False)
        raise typer.Exit(1) from error


def _shape(text: str) -> tuple[int, int]:
    numbers = _numbers(text, "--shape")
    if len(numbers) != 2:
        raise typer.BadParameter(f"--shape {text}: wanted N,K such as 4096,7168")
    return numbers[0], numbers[1]


def _numbers(text: str, option: str) -> list[int]:
    parts = text.split(",")
    if not all(x.strip().isdecimal() and int(x) > 0 for x in parts):
        raise typer.BadParameter(f"{option} {text}: wanted numbers from 1, by commas")
    return [int(x) for x in parts]


def main() -> None:
    """Entry point of the ``compile-ext`` script."""
    app()
