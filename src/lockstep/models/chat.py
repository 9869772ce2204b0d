"""A conversation as tokens, by a tokenizer's own template, and which of them the assistant wrote.

    tokens, labelled = chat_tokens(tokenizer, [{"role": "user", "content": "1 + 1?"}, ...], row=0)

A template that marks the assistant's words (`{% generation %}`) is asked for them. Of another one the conversation is
rendered up to each turn of the assistant, with the words that introduce it, and again with the turn: what the second
text has more than the first is the assistant's, its end mark too. Both must be beginnings of the whole.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.errors import DataError
from lockstep.text.examples import alike

__all__ = ["chat_prompt", "chat_template", "chat_tokens"]

_MARKED = re.compile(r"\{%-?\s*generation\s*-?%\}")
_WITHOUT = (
    "the tokenizer has no chat template: give --tokenizer of the model's chat version (its tokenizer_config.json or "
    "chat_template.jinja has one), or rows with the columns prompt and completion"
)


def chat_template(tokenizer: Any) -> str:
    """The template of a tokenizer of `transformers`; "" where it has none."""
    held = getattr(tokenizer, "chat_template", None)
    if isinstance(held, Mapping):
        held = held.get("default")
    return held or ""


def chat_tokens(
    tokenizer: Any, messages: Sequence[Mapping[str, Any]], row: int, masked: bool = True
) -> tuple[list[int], list[bool]]:
    """The tokens of a conversation, and whether each is to be learned.

    Args:
        tokenizer: of `transformers`.
        messages: the turns, each with "role" and "content".
        row: for messages.
        masked: the assistant's words alone are to be learned; else everything.

    Raises:
        DataError: no template, one that refuses these turns, or one in which a turn changes what came before it.
    """
    if not chat_template(tokenizer):
        raise DataError(f"--dataset-name, row {row} is a conversation, and {_WITHOUT}")
    try:
        if not masked:
            tokens = _encoded(tokenizer, _rendered(tokenizer, list(messages)))
            return tokens, [True] * len(tokens)
        if _MARKED.search(chat_template(tokenizer)):
            found = tokenizer.apply_chat_template(
                list(messages), tokenize=True, return_dict=True, return_assistant_tokens_mask=True
            )
            return list(found["input_ids"]), [bool(mark) for mark in found["assistant_masks"]]
        return _by_turns(tokenizer, list(messages), row)
    except DataError:
        raise
    except Exception as error:
        said = " ".join(str(error).split())[:200]
        raise DataError(
            f"--dataset-name, row {row}: the tokenizer's chat template refuses its messages ({said}); mend the row, or "
            "leave it out"
        ) from error


def chat_prompt(tokenizer: Any, prompt: str) -> list[int]:
    """The tokens of a conversation in which a user said `prompt`, up to where the assistant answers."""
    text = _rendered(tokenizer, [{"role": "user", "content": prompt}], answer=True)
    return _encoded(tokenizer, text)


def _by_turns(tokenizer: Any, messages: list[Mapping[str, Any]], row: int) -> tuple[list[int], list[bool]]:
    whole = _rendered(tokenizer, messages)
    tokens = _encoded(tokenizer, whole)
    labelled = [False] * len(tokens)
    for turn, message in enumerate(messages):
        if message.get("role") != "assistant":
            continue
        before, after = _rendered(tokenizer, messages[:turn], answer=True), _rendered(tokenizer, messages[: turn + 1])
        if not (whole.startswith(after) and after.startswith(before)):
            raise DataError(
                f"--dataset-name, row {row}: the tokenizer's chat template renders message {turn} otherwise among "
                "others, so the assistant's words cannot be told apart; give a template that marks them with "
                "{% generation %}, or --data.labels all"
            )
        begin = alike(tokens, _encoded(tokenizer, before))
        end = len(tokens) if len(after) == len(whole) else alike(tokens, _encoded(tokenizer, after))
        labelled[begin:end] = [True] * (end - begin)
    return tokens, labelled


def _rendered(tokenizer: Any, messages: list[Mapping[str, Any]], answer: bool = False) -> str:
    if not messages:  # the assistant begins: few templates render nothing at all
        return ""
    return str(tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer))


def _encoded(tokenizer: Any, text: str) -> list[int]:
    tokens: list[int] = tokenizer(text, add_special_tokens=False, return_attention_mask=False, verbose=False)[
        "input_ids"
    ]
    return tokens
