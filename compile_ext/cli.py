"""The command line: ``compile-ext demo`` and ``compile-ext doctor``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from rich.console import Console
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
        table.add_row(x.name, x.found or "-", x.use, x.reason or "ok")
    Console().print(table)


def main() -> None:
    """Entry point of the ``compile-ext`` script."""
    app()
