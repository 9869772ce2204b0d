"""Read samples of Arrow and Parquet files by index, through datasets and pyarrow.

    form = ArrowShards("parquet", "torch")
    form.prepare(file, path, target)            # Parquet -> an Arrow stream, in the cache
    form.open(target, None).read([3, 0])

An uncompressed Arrow stream is memory-mapped where it is. Parquet, Arrow's file format and compressed bodies cannot be
read by row at random: they are converted once. This file alone imports datasets and pyarrow.
"""

import importlib
from bisect import bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from pathlib import Path
from typing import Any, final

from lockstep.data.shard_cache import ShardFile
from lockstep.data.shard_formats import OpenShard, ShardFormat, ShardSummary
from lockstep.errors import ConfigError
from lockstep.extras import install_extra

__all__ = ["ArrowShards"]

# The first bytes of Arrow's file format.
_MAGIC = b"ARROW1"
# Rows of a batch in a converted file.
_ROWS = 1000
ROW_FORMATS = ("torch", "numpy", "python")


@final
class ArrowShards(ShardFormat):
    """Arrow or Parquet files; a sample is a dict of its columns.

    Args:
        name: "arrow" or "parquet".
        row_format: of values: tensors of torch, arrays of numpy, or Python's lists.

    Raises:
        ConfigError: a package is missing, or the row format is unknown.
    """

    suffix = ".arrow"
    replaces = True

    def __init__(self, name: str, row_format: str) -> None:
        if row_format not in ROW_FORMATS:
            raise ConfigError(f"lockstep.shards: row_format is {row_format!r}: it must be one of {ROW_FORMATS}")
        self.name = name
        self._row_format = row_format
        self._arrow = _package("pyarrow")
        self._datasets = _package("datasets")

    def prepared(self, file: ShardFile, path: Path | None) -> bool:
        return self.name == "parquet" or (path is not None and self._is_packed(path))

    def prepare(self, file: ShardFile, path: Path, target: Path) -> None:
        """Write an uncompressed Arrow stream."""
        if self.name == "parquet":
            parquet = _package("pyarrow.parquet")
            with parquet.ParquetFile(path) as source:
                self._write(source.iter_batches(batch_size=_ROWS), source.schema_arrow, target)
            return
        with self._arrow.memory_map(str(path)) as source:
            if _is_file_format(path):
                reader = self._arrow.ipc.open_file(source)
                batches = (reader.get_batch(number) for number in range(reader.num_record_batches))
            else:
                reader = batches = self._arrow.ipc.open_stream(source)
            self._write(batches, reader.schema, target)

    def _write(self, batches: Any, schema: Any, target: Path) -> None:
        with self._arrow.OSFile(str(target), "wb") as out, self._arrow.ipc.new_stream(out, schema) as writer:
            for batch in batches:
                writer.write_batch(batch)

    def _is_packed(self, path: Path) -> bool:
        """Whether rows cannot be mapped: reading the first batch takes memory of its own."""
        if _is_file_format(path):
            return True
        with self._arrow.memory_map(str(path)) as source:
            reader = self._arrow.ipc.open_stream(source)
            before = self._arrow.total_allocated_bytes()
            batch = next(iter(reader), None)
            # A mapped batch takes no memory; a compressed one takes about its size.
            return batch is not None and self._arrow.total_allocated_bytes() - before > batch.nbytes // 2

    def count(self, path: Path) -> ShardSummary:
        with self._arrow.memory_map(str(path)) as source:
            reader = self._arrow.ipc.open_stream(source)
            return ShardSummary(sum(batch.num_rows for batch in reader), _columns(reader.schema))

    def peek(self, file: Any) -> ShardSummary:
        """Count the rows of a Parquet file by its footer; -1 for Arrow."""
        if self.name != "parquet":
            return ShardSummary(-1)
        footer = _package("pyarrow.parquet").read_metadata(file)
        return ShardSummary(int(footer.num_rows), _columns(footer.schema.to_arrow_schema()))

    def open(self, path: Path, beside: Path | None) -> OpenShard:
        return _ArrowShard(self._datasets.Dataset.from_file(str(path)), self._row_format)

    def read(self, parts: Sequence[tuple[OpenShard, list[int]]]) -> list[Any]:
        """Return samples of several shards, all converted at once.

        Converting each shard by itself takes longer.
        """
        shards = []
        for shard, _ in parts:
            if isinstance(shard, _ArrowShard):
                shards.append(shard)
        rows = []
        for shard, (_, rows_of_shard) in zip(shards, parts, strict=True):
            rows.extend(shard.slices(rows_of_shard))
        return shards[0].convert(rows)


class _ArrowShard(OpenShard):
    def __init__(self, rows: Any, row_format: str) -> None:
        self._from_batches = _package("pyarrow").Table.from_batches
        self._batches = rows.data.table.to_batches()
        self._starts = list(accumulate((batch.num_rows for batch in self._batches), initial=0))
        self.samples = self._starts[-1]
        get_formatter = _package("datasets.formatting").get_formatter
        self._formatter = get_formatter(None if row_format == "python" else row_format, features=rows.features)

    def slices(self, rows: list[int]) -> list[Any]:
        """Return a record batch of each row, without a copy."""
        batches = self._batches
        starts = self._starts
        if len(batches) == 1:
            only = batches[0].slice
            return [only(row, 1) for row in rows]
        return [batches[number := bisect_right(starts, row) - 1].slice(row - starts[number], 1) for row in rows]

    def convert(self, rows: list[Any]) -> list[Any]:
        """Return the samples of record batches of one row each."""
        columns = self._formatter(self._from_batches(rows), query_type="batch")
        names = list(columns)
        return [dict(zip(names, values, strict=True)) for values in zip(*columns.values(), strict=True)]

    def read(self, rows: list[int]) -> list[Any]:
        return self.convert(self.slices(rows))


def _columns(schema: Any) -> str:
    """Return a line for each column: its name, its type, and whether it is nullable."""
    return "\n".join(f"{field.name}: {field.type}{'' if field.nullable else ' not null'}" for field in schema)


def _is_file_format(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_MAGIC)) == _MAGIC


@cache
def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"lockstep.shards: Arrow and Parquet need the package {error.name}: {install_extra('shards')}"
        ) from error
