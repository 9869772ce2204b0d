"""Read documents and tables from the hub's datasets and from local files.

    rows = open_rows(DataRequest("tatsu-lab/alpaca"), say=print)
    for example, last in rows.documents(0.05, scratch).train.read(): ...

Local files are json, jsonl, csv, parquet and text. Only this file needs the package `datasets`. An evaluation set is
the dataset's own split (validation or test); without one, rows are split off by a fixed seed, so that runs with other
seeds evaluate on the same rows. `reader` recognises the columns of prompts, completions and conversations. `open_table`
gives rows by index, `plain_rows` reads text files.
"""

import json
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

from lockstep.config.fields import is_hub_name
from lockstep.data.found import LIMIT
from lockstep.data.sampler import Indices, Shuffled
from lockstep.errors import DataError, LockstepError
from lockstep.extras import install_extra
from lockstep.files import bytes_text
from lockstep.text.cache import reach, snapshot, way_out
from lockstep.text.documents import Example
from lockstep.text.sources import DocumentSpan, TextFile, cut, find, pieces, split_files
from lockstep.text.tables import DataRequest, file_digest, list_suffixes, open_tables, table_files

__all__ = [
    "DataRequest",
    "DocumentRanges",
    "Documents",
    "HubSplit",
    "HubTable",
    "file_digest",
    "open_ranges",
    "open_rows",
    "open_table",
    "plain_rows",
    "table_files",
]


# Taori et al., "Stanford Alpaca: An Instruction-following LLaMA model" (2023): the two prompts for its data,
# for rows with an input and rows without.
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
# Columns of conversations: of the hub's chats, and of ShareGPT's.
_CHATS = ("messages", "conversations")
# ShareGPT's names of roles; others stay, and the chat template decides.
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant", "function_response": "tool", "observation": "tool"}
_TOOLS = "tools"

Row = Mapping[str, Any]


def reader(columns: Mapping[str, bool], column: str, flag: str, *, answers: bool) -> Callable[[Row], Example]:
    """Return a function that reads a row of these columns as an example.

    It reads a missing value as an empty text.

    Args:
        columns: name -> whether the column has text.
        column: the requested column; "" takes "messages" or "conversations", else prompt with completion or response,
            else instruction (and input) with output, else the only column with text.
        flag: the start of a message.
        answers: prefer columns that mark the answer over "text", as with `--data.labels completion`.

    Raises:
        DataError: no such column, or no unambiguous one; the message lists the columns. (From the function:) a
            conversation that is no list of turns with a role each.
    """
    names = ", ".join(columns) or "none"
    if column:
        if column not in columns:
            raise DataError(f"{flag} has no column '{column}'; its columns: {names}; name one with --data.text-column")
        if column in _CHATS and not columns[column]:
            return _conversation(column, flag)
        if not columns[column]:
            raise DataError(f"{flag}: the column '{column}' has no text; its columns: {names}; name another")
        return _column(column)
    if columns.get("text") and not (answers and _answers(columns)):
        return _column("text")
    for name in _CHATS:
        if columns.get(name) is False:
            return _conversation(name, flag)
    for prompt, completion in _PAIRS:
        if columns.get(prompt) and columns.get(completion):
            return _pair(prompt, completion)
    if columns.get("instruction") and columns.get("output"):
        return _alpaca
    texts = [name for name, is_text in columns.items() if is_text]
    if len(texts) == 1:
        return _column(texts[0])
    raise DataError(
        f"{flag} has no column 'text', 'messages' or 'conversations', no 'prompt' with 'completion' or 'response', and "
        f"no 'instruction' with 'output'; its columns: {names}; name the one to learn with --data.text-column"
    )


def _has_prompts(columns: Mapping[str, bool], column: str, *, answers: bool) -> bool:
    """Whether the rows, as `reader` reads them, mark the answer."""
    if column:
        return column in _CHATS and not columns[column]
    return bool(_answers(columns)) and (answers or not columns.get("text"))


def _ignored_note(columns: Mapping[str, bool], column: str, *, answers: bool) -> str:
    """A note if `reader` ignores a column "text"; else ""."""
    if not (answers and not column and columns.get("text") and (names := _answers(columns))):
        return ""
    return f"learning from {' and '.join(names)}; the column text is ignored (--data.text-column text uses it)"


def _answers(columns: Mapping[str, bool]) -> tuple[str, ...]:
    """The columns that mark the answer of a row; () if none do."""
    for name in _CHATS:
        if columns.get(name) is False:
            return (name,)
    pairs = (*_PAIRS, ("instruction", "output"))
    for pair in pairs:
        if all(map(columns.get, pair)):
            return pair
    return ()


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


def _conversation(column: str, flag: str) -> Callable[[Row], Example]:
    def read(row: Row) -> Example:
        turns = row[column]
        messages = [_message(turn) for turn in _present(turns)] if _are_objects(turns) else []
        if not (messages and all(isinstance(message.get("role"), str) for message in messages)):
            raise DataError(
                f"{flag}: '{column}' must be a list of turns such as {{'role': 'user', 'content': 'Hi'}} or "
                "{'from': 'human', 'value': 'Hi'}"
            )
        # ShareGPT's system prompt may have a column of its own.
        system = row.get("system")
        if column != "messages" and isinstance(system, str) and system and messages[0]["role"] != "system":
            # Left out, it would be missing without a word.
            messages.insert(0, {"role": "system", "content": system})
        return Example("", messages=tuple(messages), tools=_tools(row.get(_TOOLS), flag))

    return read


def _message(turn: Row) -> Row:
    """Return a turn as chat templates take it; ShareGPT's has "from" and "value"."""
    if "role" in turn or "from" not in turn:
        return {"content": "", **turn}
    message = {key: value for key, value in turn.items() if key not in ("from", "value")}
    role = turn["from"]
    return {"role": _SHAREGPT_ROLES.get(str(role), role), "content": turn.get("value", ""), **message}


def _tools(value: Any, flag: str) -> tuple[Row, ...]:
    """Read the tools of a conversation: JSON schemas, or their JSON text."""
    try:
        if isinstance(value, str) and value.strip():
            tools = json.loads(value)
        else:
            tools = value or []
    except ValueError as error:
        raise DataError(
            f"{flag}: 'tools' is text that is no JSON ({error}); give a list of JSON schemas of functions, or remove "
            "the column"
        ) from error
    if not _are_objects(tools):
        raise DataError(f"{flag}: 'tools' must be a list of JSON schemas of functions, or its JSON text")
    return tuple(_present(tools))


def _are_objects(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(entry, Mapping) for entry in value)


def _present(value: Any) -> Any:
    """Remove the keys without a value.

    A table has the keys of all objects in each of them.
    """
    if isinstance(value, Mapping):
        present = {}
        for key, entry in value.items():
            if entry is not None:
                present[key] = _present(entry)
        return present
    if isinstance(value, list):
        return [_present(entry) for entry in value]
    return value


_EVALUATION = ("validation", "valid", "dev", "evaluation", "eval", "test")
# Not the run's seed, so that runs with other seeds evaluate on the same rows.
_SPLIT_SEED = 0

Say = Callable[[str], None]
# A table, and the number of each of its rows in the data.
Numbered = tuple[Any, Sequence[int]]


@dataclass(frozen=True, slots=True)
class HubSplit:
    """The documents of a split.

    Attributes:
        size: total of `weigh` over all examples, for progress.
        read: makes an iterator over (example, whether it ends its document).
    """

    size: int
    read: Callable[[], Iterator[tuple[Example, bool]]]
    weigh: Callable[[Example], int]


@dataclass(frozen=True, slots=True)
class Documents:
    """Both splits of a dataset's documents.

    Attributes:
        train, evaluation: the splits.
        note: a remark for the user.
        check: call it after reading; raises DataError if the data changed meanwhile.
        prompts: the rows mark the answer.
    """

    train: HubSplit
    evaluation: HubSplit
    note: str = ""
    check: Callable[[], None] = lambda: None
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class DocumentRanges:
    """Both splits of a dataset as ranges of documents, which any process can read.

    Attributes:
        digest, revision: as of `HubRows`.
        train, evaluation: the ranges, in the data's order.
        note, prompts: as of `Documents`.
    """

    digest: str
    revision: str
    train: Sequence[HubSplit]
    evaluation: Sequence[HubSplit]
    note: str = ""
    prompts: bool = False


@dataclass(frozen=True, slots=True)
class HubRows:
    """A dataset that was located, and not yet read.

    Attributes:
        digest: hex; the same for the same content: of the files' checksums, or of the commit on the hub.
        revision: the commit on the hub, "" for files.
        documents: (share for the evaluation, a folder for temporary files) -> both splits.
    """

    digest: str
    revision: str
    documents: Callable[[float, Path], Documents]


@dataclass(frozen=True, slots=True)
class HubTable:
    """The rows of both splits, by index.

    Attributes:
        kinds: column -> its content: "Image", "ClassLabel", a dtype such as "string", or another feature's name.
        classes: column -> the names of its classes, in the order of their numbers.
        digest: hex; the same for the same content: of the files' checksums, or of the commit on the hub.
        revision: the commit on the hub, "" for files.
        parts: the training and the evaluation rows, as `datasets` has them.
        rows: the number of each of these in the data, from 0.
    """

    kinds: dict[str, str]
    classes: dict[str, tuple[str, ...]]
    digest: str
    revision: str
    parts: tuple[Any, Any]
    rows: tuple[Sequence[int], Sequence[int]]

    def values(self, column: str) -> tuple[list[Any], list[Any]]:
        """Return a column of both splits."""
        train, evaluation = (list(table.select_columns([column])[column]) for table in self.parts)
        return train, evaluation

    def images(self, column: str) -> tuple[Any, Any]:
        """Return an image column of both splits, undecoded.

        A row is {column: {"bytes": bytes or None, "path": str or None}}.
        """
        train, evaluation = (
            table.select_columns([column]).cast_column(column, type(table.features[column])(decode=False))
            for table in self.parts
        )
        return train, evaluation


def open_rows(request: DataRequest, say: Say) -> HubRows:
    """Locate the dataset.

    Raises:
        DataError: no such dataset, or files that cannot be read in the encoding. (From `documents`:) no such split or
            column, or fewer than two rows.
    """
    if is_hub_name(request.name):
        return _from_hub(request, say)
    files = table_files(request.name)
    root = Path(request.name).expanduser()
    digest = _files_digest(request, files, root)

    def documents(fraction: float, scratch: Path) -> Documents:
        with _one_line_errors(request):
            return _split_documents(open_tables(_datasets(request), request, scratch, say), request, fraction)

    return HubRows(digest, "", documents)


def open_ranges(request: DataRequest, fraction: float, size: int, scratch: Path, say: Say) -> DocumentRanges:
    """Open both splits of a dataset as ranges of about `size` bytes.

    The splits are those of `open_rows`, and of `plain_rows` for text files. Data and arguments alone decide the ranges.

    Args:
        fraction: share of the rows for the evaluation, if the data has no evaluation split.
        scratch: folder for files' rows as memory-mapped tables; any number of processes may share it.

    Raises:
        DataError: as `open_rows`.
    """
    if not is_hub_name(request.name) and not table_files(request.name):
        return _plain_ranges(request, fraction, size, say)
    if is_hub_name(request.name):
        builder, revision = _hub_builder(request, say)
        digest = _content_digest(request, [request.name, revision])
    else:
        files = table_files(request.name)
        root = Path(request.name).expanduser()
        revision = ""
        digest = _files_digest(request, files, root)
        with _one_line_errors(request):
            builder = open_tables(_datasets(request), request, scratch, say)
    with _one_line_errors(request):
        return _table_ranges(builder, request, fraction, size, digest, revision)


def _table_ranges(
    builder: Any, request: DataRequest, fraction: float, size: int, digest: str, revision: str
) -> DocumentRanges:
    builder.download_and_prepare()
    train, evaluation = _splits(builder, request)
    if evaluation is not None:
        held_out = np.empty(0, np.int64)
    else:
        held_out = _evaluated_rows(len(train), fraction)
    read, note, prompts = _row_reader(train, request)
    trained = []
    for rows in _row_ranges(train, size):
        start, stop = np.searchsorted(held_out, [rows.start, rows.stop])
        trained.append(_part(train.select(rows), read, rows, frozenset(held_out[start:stop].tolist())))
    if evaluation is None:
        per_range = max(1, len(_row_ranges(train, size)[0]))
        cuts = [held_out[at : at + per_range] for at in range(0, len(held_out), per_range)]
        evaluated = [_part(train.select(rows), read, rows.tolist()) for rows in cuts]
    else:
        evaluated = []
        for rows in _row_ranges(evaluation, size):
            evaluated.append(_part(evaluation.select(rows), read, rows))
    return DocumentRanges(digest, revision, trained, evaluated, note, prompts=prompts)


def _row_ranges(table: Any, size: int) -> list[range]:
    """Cut the rows into ranges of about `size` bytes, by their mean size."""
    rows = max(1, int(size * len(table) / max(1, table.data.nbytes)))
    return [range(at, min(at + rows, len(table))) for at in range(0, len(table), rows)]


def _plain_ranges(request: DataRequest, fraction: float, size: int, say: Say) -> DocumentRanges:
    sources = find(request.name, request.skip, say)
    splits = split_files(sources, fraction, _SPLIT_SEED)
    train, evaluation = ([_plain_part(spans) for spans in cut(documents, size)] for documents in splits)
    return DocumentRanges(_sources_digest(sources), "", train, evaluation)


def open_table(request: DataRequest, fraction: float, cache: Path, say: Say) -> HubTable:
    """Open the rows of a hub dataset or of files, in any number of processes.

    Args:
        fraction: share of the rows for the evaluation, if the data has no evaluation split.
        cache: folder for the files' rows as memory-mapped tables.

    Raises:
        DataError: no such dataset or split, or fewer than two rows.
    """
    if is_hub_name(request.name):
        builder, commit = _hub_builder(request, say)
        say(f"downloading {request.name}, unless it is in HF_HOME")
        digest = _content_digest(request, [request.name, commit])
        revision = commit
    else:
        files = table_files(request.name)
        revision = ""
        if not files:
            raise DataError(f"{request.label}: no such file or folder of files; supported: {list_suffixes()}")
        digest = _content_digest(request, [[path.name, file_digest(path)] for path in files])
        with _one_line_errors(request):
            builder = open_tables(_datasets(request), request, cache, say)
    with _one_line_errors(request):
        (train, rows), (evaluation, evaluation_rows) = _parts(builder, request, fraction)
    features = train.features
    classes = {}
    for name, feature in features.items():
        if hasattr(feature, "names"):
            classes[name] = tuple(feature.names)
    kinds = {}
    for name, feature in features.items():
        kinds[name] = str(getattr(feature, "dtype", ""))
    for name, feature in features.items():
        if type(feature).__name__ != "Value":
            kinds[name] = type(feature).__name__
    return HubTable(kinds, classes, digest, revision, (train, evaluation), (rows, evaluation_rows))


def _from_hub(request: DataRequest, say: Say) -> HubRows:
    builder, commit = _hub_builder(request, say)

    def documents(fraction: float, scratch: Path) -> Documents:
        say(f"downloading {request.name}, unless it is in HF_HOME")
        with _one_line_errors(request):
            return _split_documents(builder, request, fraction)

    return HubRows(_content_digest(request, [request.name, commit]), commit, documents)


def _hub_builder(request: DataRequest, say: Say) -> tuple[Any, str]:
    """Return the hub's dataset and its commit; without the hub, those that are in HF_HOME."""
    datasets = _datasets(request)
    if reach(say):
        folder = None
    else:
        folder = snapshot(request.name, "dataset", request.revision)
    path, revision = (str(folder), None) if folder else (request.name, request.revision or None)
    with _one_line_errors(request):
        builder = datasets.load_dataset_builder(path, request.subset or None, revision=revision)
    return builder, folder.name if folder else str(builder.hash)


def _files_digest(request: DataRequest, files: list[Path], root: Path) -> str:
    names = []
    for path in files:
        if path != root:
            names.append(path.relative_to(root).as_posix())
        else:
            names.append(path.name)
    return _content_digest(request, [[name, file_digest(path)] for name, path in zip(names, files, strict=True)])


def _content_digest(request: DataRequest, content: list[Any]) -> str:
    """Digest the content, and the flags that select from it."""
    chosen = [request.subset, request.split, request.text_column, request.encoding, *["answers"] * request.answers]
    return xxhash.xxh3_128_hexdigest(repr([content, chosen]).encode())


def _split_documents(builder: Any, request: DataRequest, fraction: float) -> Documents:
    (train, rows), (evaluation, evaluation_rows) = _parts(builder, request, fraction)
    read, note, prompts = _row_reader(train, request)
    return Documents(_part(train, read, rows), _part(evaluation, read, evaluation_rows), note, prompts=prompts)


def _row_reader(table: Any, request: DataRequest) -> tuple[Callable[[Row], Example], str, bool]:
    """Return `reader` of the columns, a remark, and whether they mark the answer."""
    columns = {}
    for key, feature in table.features.items():
        columns[key] = str(getattr(feature, "dtype", "")).endswith("string")
    column = request.text_column
    answers = request.answers
    read = reader(columns, column, f"--dataset-name {request.name}", answers=answers)
    return read, _ignored_note(columns, column, answers=answers), _has_prompts(columns, column, answers=answers)


def _parts(builder: Any, request: DataRequest, fraction: float) -> tuple[Numbered, Numbered]:
    """Both splits of a dataset, downloaded and converted now unless the package has it cached."""
    builder.download_and_prepare()
    train, evaluation = _splits(builder, request)
    if evaluation is not None:
        return (train, range(len(train))), (evaluation, range(len(evaluation)))
    trained, evaluated = _split_rows(len(train), fraction)
    return (train.select(trained), trained), (train.select(evaluated), evaluated)


def _splits(builder: Any, request: DataRequest) -> tuple[Any, Any]:
    """Return the training rows, and those of the evaluation split; None: the data has none."""
    splits = list(builder.info.splits)
    # "train[:10%]" is a part of the split "train"
    name = request.split.partition("[")[0]
    if name not in splits:
        raise DataError(
            f"--data.split {request.split}: --dataset-name {request.name} has the splits {', '.join(splits)}"
        )
    train = builder.as_dataset(split=request.split)
    # An evaluation split of the data itself comes first.
    evaluation_split = None
    for candidate in _EVALUATION:
        if candidate in splits and candidate != name:
            evaluation_split = candidate
            break
    if evaluation_split is not None:
        return train, builder.as_dataset(split=evaluation_split)
    if len(train) < 2:
        raise DataError(
            f"--dataset-name {request.name}: {len(train)} row, too few to split off an evaluation; add more"
        )
    return train, None


def _split_rows(rows: int, fraction: float) -> tuple[list[int], list[int]]:
    """Split rows into (training, evaluation), each in the data's order and at least one."""
    evaluated = _evaluated_rows(rows, fraction)
    return np.delete(np.arange(rows), evaluated).tolist(), evaluated.tolist()


def _evaluated_rows(rows: int, fraction: float) -> Indices:
    """Return the held-out rows in order: at least one, and not all."""
    count = min(max(round(rows * fraction), 1), rows - 1)
    return np.sort(Shuffled(rows, _SPLIT_SEED).at(0, count)[1])


def _part(
    table: Any,
    read: Callable[[dict[str, Any]], Example],
    rows: Sequence[int],
    left_out: frozenset[int] = frozenset(),
) -> HubSplit:
    """Return a table's rows as documents.

    Args:
        rows: the number of each row in the data.
        left_out: numbers of rows that are not documents of this split.
    """

    def documents() -> Iterator[tuple[Example, bool]]:
        row_numbers = iter(rows)
        for batch in table.iter(batch_size=1000):
            names = list(batch)
            for values in zip(*batch.values(), strict=True):
                number = next(row_numbers)
                if number in left_out:
                    continue
                try:
                    example = read(dict(zip(names, values, strict=True)))
                except DataError as error:
                    raise DataError(f"{error} (row {number})") from None
                yield replace(example, row=number), True

    return HubSplit(len(table) - len(left_out), documents, lambda example: 1)


def _datasets(request: DataRequest) -> Any:
    try:
        with warnings.catch_warnings():
            # A user cannot act on the warnings of the package's own imports.
            warnings.simplefilter("ignore")
            # The package has no annotations.
            import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise DataError(
            f"--dataset-name {request.name} needs the package datasets ({error.name} is missing): {install_extra('hf')}"
        ) from error
    datasets.logging.set_verbosity_error()
    if not is_hub_name(request.name):
        datasets.disable_progress_bars()
    return datasets


@contextmanager
def _one_line_errors(request: DataRequest) -> Iterator[None]:
    """Context manager that turns the package's errors into a DataError of one line."""
    try:
        yield
    except LockstepError:
        raise
    except Exception as error:
        name = request.name
        if "datasets" in sys.modules:
            # The package hides the cause in this error.
            generation = sys.modules["datasets"].exceptions.DatasetGenerationError
        else:
            generation = ()
        # The cause names the row.
        if isinstance(error, generation) and error.__cause__:
            reason = error.__cause__
        else:
            reason = error
        # The error of an empty file has no message.
        message = " ".join(str(reason).split()) or f"{type(reason).__name__}, as for an empty file"
        if is_hub_name(name) and isinstance(error, ConnectionError):
            text = f"no such file or folder, not in HF_HOME, and the hub is unreachable; {_way_out(request)}"
        else:
            text = f"{message[:300]}; check the file, or --data.subset, --data.revision"
        raise DataError(f"--dataset-name {name}: {text}") from error


def _way_out(request: DataRequest) -> str:
    return way_out(request.name, "dataset", "--dataset-name")


def plain_rows(name: str, skip: float = LIMIT, say: Say = lambda line: None) -> HubRows:
    """Locate the text files of `name`; see `lockstep.text.sources.find`, which raises DataError."""
    sources = find(name, skip, say)

    def documents(fraction: float, scratch: Path) -> Documents:
        train, evaluation = split_files(sources, fraction, _SPLIT_SEED)
        return Documents(_plain_part(train), _plain_part(evaluation), _note(sources), check)

    def check() -> None:
        if _sources_digest(find(name, skip)) != _sources_digest(sources):
            raise DataError(f"--dataset-name {name}: its files changed during preparation; start the run again")

    return HubRows(_sources_digest(sources), "", documents)


def _sources_digest(sources: list[TextFile]) -> str:
    return xxhash.xxh3_128_hexdigest(repr([(source.name, source.digest) for source in sources]).encode())


def _note(sources: list[TextFile]) -> str:
    readable = []
    for source in sources:
        if source.readable:
            readable.append(source.size)
    return f"{len(readable)} files ({bytes_text(sum(readable))})"


def _plain_part(spans: list[DocumentSpan]) -> HubSplit:
    def read() -> Iterator[tuple[Example, bool]]:
        return ((Example(text), is_last) for text, is_last in pieces(spans))

    return HubSplit(sum(span.stop - span.start for span in spans), read, lambda example: len(example.text))
