"""Plain decoding of a whole model in vLLM: replayed states against vLLM's own.

python benchmarks/replayssm/e2e_decode_speedup.py --model-id nvidia/NVIDIA-Nemotron-3-Nano-4B-BF16
python benchmarks/replayssm/e2e_decode_speedup.py --model-id Qwen/Qwen3.5-4B
"""

import typer

from replayssm.bench.e2e import decode

app = typer.Typer(add_completion=False, rich_markup_mode=None)  # whole option names at 80 columns
app.command()(decode)

if __name__ == "__main__":
    app()
