"""`python -m replayssm` is the `replayssm` command."""

from replayssm.cli import app

app()
