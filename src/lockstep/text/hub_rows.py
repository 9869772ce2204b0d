"""Which column of a table is its text, and how rows without one become prompts.

read = reader(columns, wanted="", flag="--dataset-name tatsu-lab/alpaca")
text = read({"instruction": "Add.", "input": "1 2", "output": "3"})
"""

from collections.abc import Callable, Mapping
from typing import Any

from lockstep.errors import DataError

__all__ = ["reader"]

# Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023): the two prompts that its data is used
# with, for rows with an input and rows without.
_INTRODUCED = "Below is an instruction that describes a task"
_WITH_INPUT = (
    _INTRODUCED + ", paired with an input that provides further context. Write a response that appropriately completes "
    "the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n{output}"
)
_WITHOUT = (
    _INTRODUCED + ". Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Response:\n{output}"
)

Row = Mapping[str, Any]


def reader(columns: Mapping[str, bool], wanted: str, flag: str) -> Callable[[Row], str]:
    """A function row -> text; a missing value is an empty text.

    Args:
        columns: name -> whether the column holds text.
        wanted: the column that was asked for; "" takes "text", else instruction (and input) with output, else the
            only column that holds text.
        flag: what a message begins with.

    Raises:
        DataError: no such column, or none that is sure to be the text; the message lists those that there are.
    """
    shown = ", ".join(columns) or "none"
    if wanted:
        if wanted not in columns:
            raise DataError(f"{flag} has no column '{wanted}'; its columns: {shown}; name one with --data.text-column")
        if not columns[wanted]:
            raise DataError(f"{flag}: the column '{wanted}' holds no text; its columns: {shown}; name another")
        return _column(wanted)
    if columns.get("text"):
        return _column("text")
    if columns.get("instruction") and columns.get("output"):
        return _prompt
    texts = [name for name, is_text in columns.items() if is_text]
    if len(texts) == 1:
        return _column(texts[0])
    raise DataError(
        f"{flag} has no column 'text' and no 'instruction' and 'output'; its columns: {shown}; name the one to learn "
        "with --data.text-column"
    )


def _column(name: str) -> Callable[[Row], str]:
    return lambda row: row[name] or ""


def _prompt(row: Row) -> str:
    values = {key: row.get(key) or "" for key in ("instruction", "input", "output")}
    return (_WITH_INPUT if values["input"].strip() else _WITHOUT).format(**values)
