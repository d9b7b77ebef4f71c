"""Words of the synthetic tasks, their tokens, and the tokenizer that knows them."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>")  # ids 0 to 3
END = 0


def words(text: str) -> tuple[str, ...]:
    """The words of a text."""
    return tuple(text.split())


NOUNS = words(
    """
    anchor apple arrow baker barrel basket bear bell bird boat book bottle bridge broom
    bucket candle captain carpet castle chair cloak clock coin crown doctor door dragon
    drum eagle engine farmer feather fence fiddle fish flag flute forest fox garden gate
    ghost giant goose hammer harbor hat horse hunter island jacket key king kite knight
    ladder lamp lantern lion mirror monkey moon needle owl painter parrot pirate planet
    queen rabbit river robot rose sailor shepherd ship soldier spoon star stranger table
    tailor tiger tower train tree turtle valley violin wagon whale wheel window wizard
    wolf
    """
)
ADJECTIVES = words(
    """
    amber blue brave bright calm clever cold copper crimson dark deep dusty early fierce
    gentle golden grand green grey happy hidden hollow honest iron ivory jolly kind
    large lazy light little lonely loud lucky merry narrow noble old pale patient plain
    proud purple quick quiet red rough royal rusty scarlet sharp silent silver simple
    small soft stone strange strong sweet swift tall tiny velvet warm wild wise wooden
    young
    """
)
PEOPLE = ("Anna", "Ben", "Clara", "David", "Emma", "Frank", "Grace", "Henry")
PLACES = ("castle", "forest", "garden", "harbor", "island", "river", "tower", "valley")
# Words of the sentences around the names, so that a sentence is short in any vocabulary.
FRAME = words(
    """
    Records Pointers Remember Repeat The the From from What code has take steps go to
    takes goes drops Where is at
    """
)
THINGS = ("apple", "book", "coin", "crown", "hammer", "key", "lamp", "spoon")


def train_tokenizer(
    texts: Iterable[str], vocabulary: int, *, repeats: int
) -> tokenizers.Tokenizer:
    """A byte-level BPE in which every digit, and every name of the tasks, is one token.

    Args:
      texts: what to learn from.
      vocabulary: tokens, special ones included.
      repeats: how often the words of the tasks are added to the texts: enough to outweigh
        the rarest merges of the texts, or they stay in pieces.

    Raises:
      ValueError: a name is not one token: `repeats` or `vocabulary` is too small.
    """
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )

    def everything() -> Iterator[str]:
        yield from texts
        words = (
            " ".join(("", *NOUNS, *ADJECTIVES, *FRAME)) + "\n" + "\n".join((*PEOPLE, *FRAME))
        )
        for _ in range(repeats):
            yield words

    tokenizer.train_from_iterator(everything(), trainer)
    Lexicon(tokenizer)  # complains if a name is in pieces
    return tokenizer


class Lexicon:
    """Token ids of words and of the fixed pieces of the tasks' sentences.

    Pieces are cut where the tokenizer itself cuts, before blanks and around digits, so that
    joining their ids gives the ids of the joined text.

    Raises:
      ValueError: a name is not one token.
    """

    def __init__(self, tokenizer: tokenizers.Tokenizer):
        self.tokenizer = tokenizer
        self.nouns = self._single(NOUNS)
        self.adjectives = self._single(ADJECTIVES)
        self.starts = self._single(PEOPLE, before="")  # they begin sentences
        self.ids = functools.cache(self._ids)

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def _single(self, words: tuple[str, ...], before: str = " ") -> tuple[int, ...]:
        found = [self._ids(before + word) for word in words]
        for word, ids in zip(words, found, strict=True):
            if len(ids) != 1:
                raise ValueError(
                    f"the name {word!r} is {len(ids)} tokens, not one: train the tokenizer "
                    "with more repeats of the names, or a larger vocabulary"
                )
        return tuple(ids[0] for ids in found)

    def digits(self, number: int, width: int = 1) -> tuple[int, ...]:
        """A blank and the digits of a number, zeros in front up to `width`."""
        return self.ids(f" {number:0{width}d}")
