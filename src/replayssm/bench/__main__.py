"""`python -m replayssm.bench`: one subcommand for each kind of measurement."""

import typer

from replayssm.bench import cpu

app = typer.Typer(help="Measure, and append rows to results/.", no_args_is_help=True)
app.command("cpu")(cpu.main)
app.callback()(lambda: None)

if __name__ == "__main__":
    app()
