"""Speculative decoding of a whole model in vLLM: replayed states against vLLM's own, one for each draft.

python benchmarks/replayssm/e2e_spec_decode_throughput.py --batch-size 512 \
    --model-id nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-NVFP4
"""

import typer

from replayssm.bench.e2e import speculative

app = typer.Typer(add_completion=False, rich_markup_mode=None)  # whole option names at 80 columns
app.command()(speculative)

if __name__ == "__main__":
    app()
