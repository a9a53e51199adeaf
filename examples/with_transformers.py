"""A Transformers model that decodes with the replayed cache: one line, and the text of the host's own cache.

python examples/with_transformers.py [MODEL FOLDER]
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

from replayssm.integrations.transformers import disable, enable, replay_cache

BUNDLED = Path(__file__).parents[1] / "models" / "nemotron-h-gsm"
PROMPTS = [
    "Q: Ali has 3 red and 4 blue pens. How many pens does Ali have?\nA:\n",
    "Q: What is half of 90?\nA:\n",
]


def main(folder: Path = BUNDLED, new_tokens: int = 48) -> tuple[list[str], list[str]]:
    """What both caches write."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(PROMPTS, return_tensors="pt", padding=True, return_token_type_ids=False)

    def write() -> tuple[list[str], object]:
        out = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False, return_dict_in_generate=True)
        return tokenizer.batch_decode(out.sequences, skip_special_tokens=True), out.past_key_values

    host, _ = write()
    enable(model, window=16)
    replayed, cache = write()
    used = replay_cache(cache)  # the ReplayCache behind the host's cache, a slot per row
    assert used is not None
    print(f"state memory {used.nbytes.total:,} bytes; {used.bytes_per_token().written:,.0f} written per token and row")
    disable(model)  # the host's own cache again
    return host, replayed


if __name__ == "__main__":
    host, replayed = main(*map(Path, sys.argv[1:2]))
    print("\n".join(replayed))
    print("the host's own cache writes", "the same" if host == replayed else "something else")
