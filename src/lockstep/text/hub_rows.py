"""Which columns of a table are its text, its prompts and completions, or its conversations.

read = reader(columns, wanted="", flag="--dataset-name tatsu-lab/alpaca", answers=True)
example = read({"instruction": "Add.", "input": "1 2", "output": "3"})
"""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import DataError
from lockstep.text.examples import Example

__all__ = ["has_prompts", "passed_over", "reader"]

# Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023): the two prompts that its data is used
# with, for rows with an input and rows without.
_INTRODUCED = "Below is an instruction that describes a task"
_WITH_INPUT = (
    _INTRODUCED + ", paired with an input that provides further context. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n"
)
_WITHOUT = (
    _INTRODUCED + ". Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Response:\n"
)
_PAIRS = (("prompt", "completion"), ("prompt", "response"))
_MESSAGES = "messages"

Row = Mapping[str, Any]


def reader(columns: Mapping[str, bool], wanted: str, flag: str, *, answers: bool) -> Callable[[Row], Example]:
    """A function row -> example; a missing value is an empty text.

    Args:
        columns: name -> whether the column holds text.
        wanted: the column that was asked for; "" takes "messages", else prompt with completion or response, else
            instruction (and input) with output, else the only column that holds text.
        flag: what a message begins with.
        answers: "text" is taken after those that say which part is the answer, as with `--data.labels completion`; else
            before them.

    Raises:
        DataError: no such column, or none that is sure to be the text; the message lists those that there are.
            (from the function) "messages" that are no list of turns with a role each.
    """
    shown = ", ".join(columns) or "none"
    if wanted:
        if wanted not in columns:
            raise DataError(f"{flag} has no column '{wanted}'; its columns: {shown}; name one with --data.text-column")
        if wanted == _MESSAGES and not columns[wanted]:
            return lambda row: _conversation(row, flag)
        if not columns[wanted]:
            raise DataError(f"{flag}: the column '{wanted}' holds no text; its columns: {shown}; name another")
        return _column(wanted)
    if columns.get("text") and not (answers and _answers(columns)):
        return _column("text")
    if columns.get(_MESSAGES) is False:
        return lambda row: _conversation(row, flag)
    for prompt, completion in _PAIRS:
        if columns.get(prompt) and columns.get(completion):
            return _pair(prompt, completion)
    if columns.get("instruction") and columns.get("output"):
        return _alpaca
    texts = [name for name, is_text in columns.items() if is_text]
    if len(texts) == 1:
        return _column(texts[0])
    raise DataError(
        f"{flag} has no column 'text' or 'messages', no 'prompt' with 'completion' or 'response', and no 'instruction' "
        f"with 'output'; its columns: {shown}; name the one to learn with --data.text-column"
    )


def has_prompts(columns: Mapping[str, bool], wanted: str, *, answers: bool) -> bool:
    """Whether the rows, as `reader` reads them, say which part of them is the answer; for columns that it takes."""
    if wanted:
        return wanted == _MESSAGES and not columns[wanted]
    return bool(_answers(columns)) and (answers or not columns.get("text"))


def passed_over(columns: Mapping[str, bool], wanted: str, *, answers: bool) -> str:
    """What a person should know of a column "text" that `reader` leaves aside; "" where it does not."""
    if not (answers and not wanted and columns.get("text") and (found := _answers(columns))):
        return ""
    return f"learning from {' and '.join(found)}; the column text is left aside (--data.text-column text takes it)"


def _answers(columns: Mapping[str, bool]) -> tuple[str, ...]:
    """The columns that say which part of a row is the answer; () where none do."""
    if columns.get(_MESSAGES) is False:
        return (_MESSAGES,)
    pairs = (*_PAIRS, ("instruction", "output"))
    return next((pair for pair in pairs if all(map(columns.get, pair))), ())


def _column(name: str) -> Callable[[Row], Example]:
    return lambda row: Example(row[name] or "")


def _pair(prompt: str, completion: str) -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        begin = row[prompt] or ""
        return Example(begin + (row[completion] or ""), len(begin))

    return read


def _alpaca(row: Row) -> Example:
    values = {key: row.get(key) or "" for key in ("instruction", "input", "output")}
    begin = (_WITH_INPUT if values["input"].strip() else _WITHOUT).format(**values)
    return Example(begin + values["output"], len(begin))


def _conversation(row: Row, flag: str) -> Example:
    turns = row[_MESSAGES]
    if not (
        isinstance(turns, list)
        and turns
        and all(isinstance(turn, Mapping) and isinstance(turn.get("role"), str) for turn in turns)
    ):
        raise DataError(f"{flag}: 'messages' must be a list of turns such as {{'role': 'user', 'content': 'Hi'}}")
    # a table has every key in every turn: None where a turn has it not
    kept = ({key: value for key, value in turn.items() if value is not None} for turn in turns)
    return Example("", messages=tuple({"content": "", **turn} for turn in kept))
