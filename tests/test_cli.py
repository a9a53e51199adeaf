"""The command line on tiny random models: what it prints, writes, and says when something is wrong."""

import importlib
import json
import sys

import pytest
import torch
from typer.testing import CliRunner

transformers = pytest.importorskip("transformers")

from replayssm.cli import app  # noqa: E402
from replayssm.compare import final_number, passes  # noqa: E402

runner = CliRunner(env={"COLUMNS": "160"})
LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789 .:?\n"


def config(kind):
    ids = {"vocab_size": len(LETTERS) + 2, "pad_token_id": 0, "bos_token_id": None, "eos_token_id": 1}
    if kind == "nemotron_h":
        return transformers.NemotronHConfig(
            **ids,
            hidden_size=32,
            layers_block_type=["linear_attention", "full_attention", "linear_attention"],
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=16,
            intermediate_size=32,
            mamba_num_heads=4,
            mamba_head_dim=8,
            ssm_state_size=16,
            n_groups=2,
            chunk_size=8,
        )
    return transformers.Qwen3_5TextConfig(
        **ids,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
    )


@pytest.fixture(scope="module", params=["nemotron_h", "qwen3_5_text"])
def folder(request, tmp_path_factory):
    """A model folder as `save_pretrained` writes it: random weights, one token per letter."""
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config(request.param)).save_pretrained(path)
    letters = {letter: i for i, letter in enumerate(["<pad>", "<eos>", *LETTERS])}
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=letters, merges=[]))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    ).save_pretrained(path)
    return path


def problems(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_compare_shows_and_writes_both_caches(folder, tmp_path):
    held_out = problems(
        tmp_path / "held_out.jsonl",
        [
            {"prompt": "two plus two?", "answer": "4"},
            {"prompt": "seven plus one is?", "answer": 8},
            {"prompt": "a longer prompt, padded on its left.", "answer": "1"},
        ],
    )
    result = runner.invoke(
        app,
        ["compare", "--model", str(folder), "--prompts", str(held_out), "--batch", "2", "-n", "30", "--window", "5"]
        + ["--format", "fp32", "--format", "split16", "--show-example"]
        + ["--json", str(tmp_path / "rows.json"), "--plot", str(tmp_path / "rows.png")],
    )
    assert result.exit_code == 0, result.output
    for words in ("host cache", "replayed, fp32", "replayed, split16", "tokens/s", "87 of 87", "two plus two?"):
        assert words in result.output

    document = json.loads((tmp_path / "rows.json").read_text())
    assert document["provenance"]["versions"]["torch"] and document["provenance"]["command"]
    host, fp32, split16 = document["rows"]
    assert (host["cache"], fp32["cache"], fp32["format"], split16["format"]) == ("host", "replay", "fp32", "split16")
    assert host["max_logprob_difference"] is None and host["window"] is None and fp32["window"] == 5
    assert fp32["max_logprob_difference"] < 1e-4  # five flushes of five tokens, rows of three lengths
    assert fp32["compared_tokens"] == 3 * 29 and fp32["answers"] == 3
    assert fp32["state_bytes_written_per_token"] < host["state_bytes_written_per_token"]
    assert split16["state_bytes_read_per_token"] < fp32["state_bytes_read_per_token"]
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_generate_gives_the_same_text_with_both_caches(folder, tmp_path):
    command = ["generate", "--model", str(folder), "-n", "40", "--window", "7"]
    replayed = runner.invoke(app, [*command, "abc"])
    assert replayed.exit_code == 0, replayed.output
    assert replayed.output.strip()
    assert runner.invoke(app, [*command, "--host-cache", "abc"]).output == replayed.output
    (tmp_path / "prompt.txt").write_text("abc")
    assert runner.invoke(app, [*command, "--file", str(tmp_path / "prompt.txt")]).output == replayed.output
    assert runner.invoke(app, command, input="abc").output == replayed.output


def test_generate_ends_where_stop_was_written(folder):
    command = ["generate", "--model", str(folder), "-n", "40", "abc"]
    whole = runner.invoke(app, command).output
    result = runner.invoke(app, [*command, "--stop", whole[9:11]])
    assert result.exit_code == 0, result.exception
    assert result.output == whole[: whole.index(whole[9:11]) + 2] + "\n"


def test_generate_samples_with_a_seed(folder):
    command = ["generate", "--model", str(folder), "-n", "20", "--temperature", "1", "abc"]
    first, second, other = (runner.invoke(app, [*command, "--seed", seed]).output for seed in "112")
    assert first == second != other


@pytest.mark.parametrize("tree", ["3", "2x1"])
@pytest.mark.parametrize("draft", ["ngram", "folder"])
def test_generate_with_drafts_gives_the_same_text(folder, draft, tree):
    command = ["generate", "--model", str(folder), "-n", "30", "--window", "7", "abcabcabcab"]
    plain = runner.invoke(app, command).stdout
    result = runner.invoke(app, [*command, "--draft", draft if draft == "ngram" else str(folder), "--tree", tree])
    assert result.exit_code == 0, result.output
    assert result.stdout == plain
    assert "30 tokens in " in result.stderr and "accepted" in result.stderr
    stopped = runner.invoke(app, [*command, "--stop", plain[9:11]]).stdout
    part = runner.invoke(app, [*command, "--draft", draft if draft == "ngram" else str(folder), "--stop", plain[9:11]])
    assert part.stdout == stopped != plain


def test_compare_has_a_speculative_column(folder, tmp_path):
    command = [
        "compare",
        "--model",
        str(folder),
        "-p",
        "abc abc abc",
        "-p",
        "a longer one",
        "-n",
        "20",
        "--window",
        "5",
    ]
    result = runner.invoke(
        app,
        [*command, "--draft", "ngram", "--draft", "{model}", "--tree", "2x1", "--json", str(tmp_path / "rows.json")],
    )
    assert result.exit_code == 0, result.output
    for words in ("drafts,", "ngram 2x1", folder.name, "tokens / forward", "38 of 38"):
        assert words in result.output.replace("\n", " ")
    host, fp32, ngram, own = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert (fp32["draft"], ngram["draft"], own["draft"]) == (None, "ngram", folder.name)
    for row in (ngram, own):
        assert row["equal_tokens"] == row["compared_tokens"] == 38 and row["max_logprob_difference"] < 1e-4
    assert own["tokens_per_forward"] > 2.5 and own["tree"] == "2x1"  # 19 tokens of 3 a round


def test_passes_counts_every_run():
    # 3 batches, in each two runs of three caches
    assert passes(5, caches=2, batch=2, repeats=2) == 3 * 2 * 3


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("so it is 12.", "12"),
        ("$1,250.00", "1250"),
        ("3 + 4 = 7.50", "7.5"),
        ("it falls to -5", "-5"),
        ("100", "100"),
        ("2 + 2 = 4\n#### 4\n\nQ: and 3 + 3?\n#### 6", "4"),
        ("none", None),
    ],
)
def test_final_number(text, number):
    assert final_number(text) == number


# --- what a user got wrong: one sentence, exit code 2, no traceback ---------------------------------------------------


def sentence(*arguments, input=None):
    result = runner.invoke(app, list(map(str, arguments)), input=input)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    (line,) = result.stderr.strip().splitlines()
    assert line.startswith("error: ") and line.endswith(".")
    return line


COMMANDS = pytest.mark.parametrize("command", [("generate", "abc"), ("compare", "--prompt", "abc")], ids=lambda c: c[0])


@COMMANDS
def test_no_such_folder(command, tmp_path):
    assert "is not a folder: --model takes a folder with config.json" in sentence(*command, "-m", tmp_path / "none")


@COMMANDS
def test_folder_without_config(command, tmp_path):
    assert "holds no config.json" in sentence(*command, "-m", tmp_path)


@COMMANDS
def test_folder_without_weights(command, tmp_path):
    config("nemotron_h").save_pretrained(tmp_path)
    assert "holds a config.json but no weights" in sentence(*command, "-m", tmp_path)


@COMMANDS
def test_unreadable_weights(command, tmp_path):
    config("nemotron_h").save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not weights")
    assert "could not be loaded" in sentence(*command, "-m", tmp_path)


@COMMANDS
def test_unknown_model_type(command, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "perceptron"}')
    (tmp_path / "model.safetensors").write_bytes(b"")
    line = sentence(*command, "-m", tmp_path)
    assert "is no config that Transformers knows" in line and "perceptron" in line


@COMMANDS
def test_unknown_format(command, folder):
    assert "fp23" in sentence(*command, "-m", folder, "--format", "fp23")


@COMMANDS
def test_unknown_dtype(command, folder):
    assert "--dtype must be one of float32, bfloat16, float16; got int4." in sentence(
        *command, "-m", folder, "--dtype", "int4"
    )


@COMMANDS
def test_model_without_recurrent_layers(command, folder, tmp_path):
    llama = transformers.LlamaConfig(
        vocab_size=43, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    transformers.AutoModelForCausalLM.from_config(llama).save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(tmp_path)
    assert "llama" in sentence(*command, "-m", tmp_path)


@COMMANDS
def test_wrong_drafts(command, folder, tmp_path):
    for tree in ("0", "2x", "wide", "2x0"):
        assert "--tree must be a number of drafts in a row such as 4, or children per depth" in sentence(
            *command, "-m", folder, "--draft", "ngram", "--tree", tree
        )
    assert "--draft must be ngram, mtp or a model folder: " in sentence(*command, "-m", folder, "--draft", "bigram")
    assert "multi-token-prediction head" in sentence(*command, "-m", folder, "--draft", "mtp") or "mtp.*" in sentence(
        *command, "-m", folder, "--draft", "mtp"
    )
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    text = (tmp_path / "tokenizer.json").read_text()
    (tmp_path / "tokenizer.json").write_text(text.replace('"a"', '"A"'))
    assert "the draft model must have the model's tokenizer" in sentence(*command, "-m", folder, "--draft", tmp_path)


def test_drafts_need_the_replayed_cache(folder):
    assert "--draft needs the replayed cache" in sentence(
        "generate", "-m", folder, "--host-cache", "--draft", "ngram", "a"
    )


def test_empty_prompts(folder, tmp_path):
    assert "the prompt is empty" in sentence("generate", "-m", folder, " ")
    assert "the prompt is empty" in sentence("generate", "-m", folder, input="\n")
    assert "a prompt is empty" in sentence("compare", "-m", folder, "-p", "")
    (tmp_path / "none.jsonl").write_text("\n")
    assert "a prompt is empty" in sentence("compare", "-m", folder, "--prompts", tmp_path / "none.jsonl")


def test_prompt_given_twice(folder, tmp_path):
    file = problems(tmp_path / "p.jsonl", [{"prompt": "abc"}])
    assert "both given" in sentence("generate", "-m", folder, "abc", "--file", file)
    assert "both given" in sentence("compare", "-m", folder, "--prompt", "abc", "--prompts", file)


def test_malformed_problems(folder, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"question": "abc"}\n')
    assert "p.jsonl, line 2 is not a JSON object" in sentence(
        "compare", "-m", folder, "--prompts", tmp_path / "p.jsonl"
    )
    assert "is not a file" in sentence("compare", "-m", folder, "--prompts", tmp_path / "none.jsonl")


def test_place_that_cannot_be_written(folder, tmp_path):
    assert "can't be written" in sentence("compare", "-m", folder, "-p", "abc", "--json", tmp_path / "no" / "rows.json")


@COMMANDS
def test_without_transformers(command, folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers.utils", None)
    assert "pip install 'replayssm[transformers]'" in sentence(*command, "-m", folder)


def test_without_typer(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "replayssm.cli")
    with pytest.raises(SystemExit, match=r"needs typer: pip install 'replayssm\[transformers\]'"):
        importlib.import_module("replayssm.cli")


def test_too_few_tokens(folder):
    assert "--max-new-tokens must be at least 2" in sentence("compare", "-m", folder, "-p", "abc", "-n", "1")
