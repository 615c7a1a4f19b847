"""Train the tokenizer:  python -m training.tokenizer_maker FOLDER

Byte-level BPE of 4,056 pieces over the corpus and the generator's conversations, with the released
special tokens above them. The shipped tokenizer is kept from run to run: a new one changes every
token id, and with them every checkpoint.
"""

import argparse
import json
import re
from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data import recall, tool_use
from training.data.maker import SINGLES
from training.data.seeds import Purpose, stream
from training.data.text import CORPUS, KINDS, read_documents
from training.data.turns import EFFORTS, SYSTEMS, Dice, head
from training.shape import FIRST_SPECIAL, SPECIAL_TOKENS, TOKEN

# The family's split pattern with single digits instead of groups of up to three.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIAL = re.compile("|".join(re.escape(token) for token in SPECIAL_TOKENS))
LONGEST = 24
CONVERSATIONS, TOOL_CHATS, RETRIEVALS = 60_000, 8_000, 8_000
EVERY = {"prose": 4, "code": 8}  # documents read: the generator's language must weigh enough


def samples() -> Iterator[str]:
    """Text without special tokens."""
    for kind in KINDS:
        yield from read_documents(CORPUS / f"{kind}.txt.xz")[:: EVERY[kind]]
    for text in _conversations(Dice(stream(Purpose.TOKENIZER))):
        yield from SPECIAL.split(text)


def _conversations(dice: Dice) -> Iterator[str]:
    for _ in range(CONVERSATIONS):
        turn = dice.r.choices(list(SINGLES), list(SINGLES.values()))[0](dice)
        yield head(dice.pick(EFFORTS), dice.pick(SYSTEMS)) + turn.prompt + turn.answer("Max")
    for _ in range(TOOL_CHATS):
        made = tool_use.tool_chat(dice, [dice.pick(("tool_call", "tool_parallel"))])
        yield head("Max", None, made.tools)
        for turn in made.turns:
            yield turn.prompt + turn.answer("Max")
    for _ in range(RETRIEVALS):
        codes = recall.hard_codes(dice, 6)
        yield "\n".join(line for history in codes.lines for line in history) + "\n"
        turn = recall.ask_some(dice, codes.table)
        yield turn.prompt + turn.reply


def make_tokenizer(texts: Iterator[str]) -> Tokenizer:
    """Raises ValueError when there is too little text for the vocabulary."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(SPLIT), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=FIRST_SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
        max_token_length=LONGEST,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != FIRST_SPECIAL:
        raise ValueError(f"{tokenizer.get_vocab_size()} pieces, not {FIRST_SPECIAL}: more text")
    tokenizer.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in SPECIAL_TOKENS]
    )
    wrong = {name for name, i in TOKEN.items() if tokenizer.token_to_id(name) != i}
    if wrong:
        raise ValueError(f"special tokens at other ids than shape.py says: {sorted(wrong)}")
    return tokenizer


def tokenizer_config() -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 16384,
        "clean_up_tokenization_spaces": False,
        "padding_side": "left",
        "eos_token": "<|endoftext|>",
        "pad_token": "<|endoftext|>",
        "extra_special_tokens": {"image_token": "<|image|>", "video_token": "<|video|>"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m training.tokenizer_maker")
    parser.add_argument("folder", type=Path, help="where tokenizer.json goes")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    make_tokenizer(samples()).save(str(folder / "tokenizer.json"))
    text = json.dumps(tokenizer_config(), indent=1) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
