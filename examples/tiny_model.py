"""Write a small Llama with random weights and its tokenizer: real engines without a download.

    python examples/tiny_model.py DIRECTORY [--seed N]

Initialised with a standard deviation of 0.05: at the usual 0.02 the next token hardly
depends on what stands in the KV cache, and a wrong block would go unnoticed.
The same seed gives the same bytes; another seed gives other weights of the same architecture.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

MAX_MODEL_LEN = 8192
SIZES = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SPECIAL_TOKENS = ("<|end|>", "<|system|>", "<|user|>", "<|assistant|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def build_tokenizer() -> Tokenizer:
    """Return a byte-level BPE that merges pairs of letters; needs no training text."""
    space, letters = "Ġ", ascii_lowercase
    pairs = list(product(letters, letters))
    starts = [(space, letter) for letter in letters]
    words = [(space + first, second) for first, second in pairs]
    merges = starts + pairs + words
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    pieces = alphabet + [left + right for left, right in merges]
    tokenizer = Tokenizer(BPE({piece: i for i, piece in enumerate(pieces)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL_TOKENS])
    return tokenizer


def write_tokenizer(directory: Path) -> int:
    """Write the tokenizer with its chat template; return the size of its vocabulary."""
    tokenizer = build_tokenizer()
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[0],
        "model_max_length": MAX_MODEL_LEN,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=1))
    return int(tokenizer.get_vocab_size())


def write_model(directory: Path, seed: int = 0, **sizes: int) -> Path:
    """Write weights, config and tokenizer into ``directory`` and return it.

    ``sizes``: fields of transformers' LlamaConfig, such as ``hidden_size``, in place of those here.
    A directory that is already complete for this seed and these is left alone.  Takes a few seconds
    (torch and transformers are imported), writes about 5 MB.
    """
    done = directory / "seed"
    asked = json.dumps([seed, sizes]) if sizes else str(seed)
    if done.exists() and done.read_text() == asked:
        return directory
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    directory.mkdir(parents=True, exist_ok=True)
    vocab_size = write_tokenizer(directory)
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocab_size,
        **(SIZES | sizes),
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.05,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=vocab_size - len(SPECIAL_TOKENS),
        dtype="bfloat16",
    )
    model: Any = AutoModelForCausalLM.from_config(config)
    model.to(torch.bfloat16).save_pretrained(directory)
    done.write_text(asked)
    return directory


def main() -> None:
    """Command line: write one model."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("directory", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(write_model(args.directory, args.seed))


if __name__ == "__main__":
    main()
