"""The command line: ``compile-ext demo``."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(
    help="What serving engines hand-code per layer, for every model under torch.compile.",
    no_args_is_help=True,
)


class Model(str, Enum):
    """What the demo runs."""

    decoder = "decoder"
    smollm2 = "smollm2"


@app.callback()
def _commands() -> None:
    """Keeps ``demo`` a subcommand while it is the only one."""


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


def main() -> None:
    """Entry point of the ``compile-ext`` script."""
    app()
