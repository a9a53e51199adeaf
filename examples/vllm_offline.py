"""vLLM with the replayed cache, offline: one setting.

python examples/vllm_offline.py [MODEL FOLDER OR HUB'S NAME]        needs a GPU, vLLM and this package beside it
"""

import sys
from pathlib import Path

BUNDLED = Path(__file__).parents[1] / "models" / "nemotron-h-gsm"
PROMPTS = [
    "Q: Ali has 3 red and 4 blue pens. How many pens does Ali have?\nA:\n",
    "Q: What is half of 90?\nA:\n",
]


def main(model: str = str(BUNDLED), format: str = "split16", window: int = 16, new_tokens: int = 48) -> list[str]:
    """What the model writes."""
    try:
        from vllm import LLM, SamplingParams
    except ImportError as error:
        raise SystemExit(
            f"this example needs {error.name}, on a machine with a GPU: pip install 'replayssm[vllm]'."
        ) from error

    llm = LLM(
        model,
        max_model_len=1024,
        enable_prefix_caching=False,
        additional_config={"replayssm": {"format": format, "window": window}},
    )
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=new_tokens))
    return [output.prompt + output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    print("\n\n".join(main(*sys.argv[1:2])))
