"""A byte-level BPE tokenizer of Qwen's kind, with Qwen's special tokens, for checkpoints of our own.

Every string has an encoding, since the 256 bytes come first in the vocabulary. Must not know what the text is about.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Of one token each, but shown when an answer is decoded: what parses tool calls looks for them in the text.
TOOL_TOKENS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")

# How Qwen's tokenizers cut text before merging bytes: contractions, words with one leading character, single digits,
# punctuation, line ends, blanks.
_PIECES = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CHAT_TEMPLATE = Path(__file__).parent / "chat_template.jinja"


def train_tokenizer(texts: Iterable[str], *, vocab_size: int) -> Tokenizer:
    """Learns the merges from `texts` and appends the special tokens.

    Args:
        vocab_size: entries in all, the special ones included.

    Raises:
        ValueError: the texts do not hold enough distinct pairs for that many entries.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    learned = vocab_size - len(SPECIAL_TOKENS) - len(TOOL_TOKENS)
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=learned,
            min_frequency=1,
            show_progress=False,
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        ),
    )
    if tokenizer.get_vocab_size() != learned:
        raise ValueError(f"the texts give {tokenizer.get_vocab_size()} entries, {learned} were asked for")
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in TOOL_TOKENS])
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, folder: Path, *, processor_class: str, max_length: int) -> None:
    """Writes tokenizer.json, tokenizer_config.json and chat_template.jinja into an existing folder."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "Qwen2Tokenizer",
        "processor_class": processor_class,
        "model_max_length": max_length,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "unk_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "errors": "replace",
        "split_special_tokens": False,
        "additional_special_tokens": [token for token in SPECIAL_TOKENS if token != "<|endoftext|>"],
        "added_tokens_decoder": {
            str(tokenizer.token_to_id(token)): {
                "content": token,
                "lstrip": False,
                "normalized": False,
                "rstrip": False,
                "single_word": False,
                "special": token in SPECIAL_TOKENS,
            }
            for token in SPECIAL_TOKENS + TOOL_TOKENS
        },
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")
    (folder / "chat_template.jinja").write_text(_CHAT_TEMPLATE.read_text())
