"""What one row of a dataset is to a language model: a text, a prompt with its completion, or a conversation.

example = Example("### Question: 1 + 1\\n### Answer: 2", given=25)     # the first 25 characters are not learned
tokens, labelled = tokens_of(tokenizer, [example], special=False)[0]
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from lockstep.errors import DataError

__all__ = ["Example", "Tokenizer", "alike", "tokens_of"]


class Tokenizer(Protocol):
    """What turns texts into tokens: `models.hf.HubTokenizer`, or a `ByteBPE` that was trained here."""

    vocab_size: int
    separator: int

    def encode_all(self, texts: list[str], special: bool = False) -> list[list[int]]:
        """The tokens of each text; `special` adds what the tokenizer puts around a text by itself."""

    def decode(self, tokens: Iterable[int]) -> str:
        """The text of the tokens."""


@dataclass(frozen=True, slots=True)
class Example:
    """One row.

    Attributes:
        text: what is read; "" for a conversation, whose text the tokenizer's template makes.
        given: so many of its first characters are the prompt.
        messages: the turns of a conversation, each with "role" and "content".
        row: its number in the dataset, from 0; -1 for a file.
    """

    text: str
    given: int = 0
    messages: tuple[Mapping[str, Any], ...] = ()
    row: int = -1


def tokens_of(
    tokenizer: Tokenizer, examples: Sequence[Example], special: bool = False, masked: bool = True
) -> list[tuple[list[int], list[bool]]]:
    """(tokens, whether each belongs to what is to be learned) of each example.

    A prompt and its completion are tokenized as one text, as without labels; the first token in which that text differs
    from the prompt alone is the completion's first.

    Args:
        special: adds what the tokenizer puts around a text by itself; a conversation's template says that already.
        masked: completions and the assistant's words alone are to be learned; else everything.

    Raises:
        DataError: a conversation that the tokenizer has no template for, or whose turns cannot be told apart.
    """
    texts = [e.text for e in examples if not e.messages]
    plain = iter(tokenizer.encode_all(texts, special) if texts else [])
    asked = [e.text[: e.given] for e in examples if e.given and masked]
    prompts = iter(tokenizer.encode_all(asked, special) if asked else [])
    found = []
    for example in examples:
        if example.messages:
            encode = getattr(tokenizer, "encode_chat", None)
            if encode is None:
                raise DataError(
                    "--dataset-name has conversations (messages), and a tokenizer that is trained here has no template "
                    "for them: give --tokenizer of a chat model, rows with the columns prompt and completion, or "
                    "--data.text-column text where they are written out in such a column"
                )
            found.append(encode(example.messages, example.row, masked))
            continue
        tokens = next(plain)
        begun = alike(tokens, next(prompts)) if example.given and masked else 0
        found.append((tokens, [place >= begun for place in range(len(tokens))]))
    return found


def alike(one: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens both begin."""
    short = min(len(one), len(other))
    return next((place for place in range(short) if one[place] != other[place]), short)
