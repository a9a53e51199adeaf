"""Speculative decoding with a recurrent model, which Transformers refuses without the replayed cache.

Drafts are looked up in the text so far (prompt_lookup_num_tokens). Rejected ones are forgotten by moving a cursor.

python examples/speculative.py [MODEL FOLDER]
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replayssm.integrations.transformers import enable

BUNDLED = Path(__file__).parents[1] / "models" / "qwen3.5-gsm"
PROMPT = "Q: A bus has 40 seats and 27 people on it. How many seats are free?\nA:\n"


def main(folder: Path = BUNDLED, new_tokens: int = 64, drafts: int = 3) -> tuple[list[int], list[int], int]:
    """Tokens of plain decoding, tokens with drafts, and how many forwards of the model the latter took."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    inputs = tokenizer(PROMPT, return_tensors="pt", return_token_type_ids=False)
    plain = model.generate(**inputs, max_new_tokens=new_tokens, do_sample=False)[0].tolist()

    forwards = 0

    def count(*_: object) -> None:
        nonlocal forwards
        forwards += 1

    enable(model, max_tokens=1 + drafts)
    handle = model.register_forward_hook(count)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=new_tokens, do_sample=False, prompt_lookup_num_tokens=drafts
        )  # fmt: skip
    handle.remove()
    drafted = out[0].tolist()
    print(tokenizer.decode(drafted, skip_special_tokens=True))
    return plain, drafted, forwards


if __name__ == "__main__":
    plain, drafted, forwards = main(*map(Path, sys.argv[1:2]))
    print(f"{len(drafted)} tokens with {forwards} forwards; plain decoding gives the same: {plain == drafted}")
