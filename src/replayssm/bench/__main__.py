"""`python -m replayssm.bench`: one subcommand for each kind of measurement, and one for pictures."""

import typer

from replayssm.bench import cpu, kernels, launches, parts, plot, speculation

app = typer.Typer(help="Measure, and append rows to results/.", no_args_is_help=True)
app.command("cpu")(cpu.main)
app.command("kernels")(kernels.main)
app.command("launches")(launches.main)
app.command("parts")(parts.main)
app.command("speculation")(speculation.main)
app.command("plot")(plot.main)

if __name__ == "__main__":
    app()
