"""Digest, square and sketch tensors so that the results add up over shards.

rows = sum_pieces([(weight, ElementPlaces(0)), (shard, ElementPlaces(4096))])   # int64 [2, WIDTH], on the device

A row has a digest (32 bits: a sum over the elements of a hash of position and bits), the sum of squares (float64) and
SKETCH signed sums (float64). The signs depend on an element's position in the whole tensor, so the mean square of the
differences of two sketches estimates the squared distance of two tensors that are on different machines. Values of
less than four bytes are converted to float32, integers to float64. Zeros add nothing. Nothing waits for the device.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

__all__ = [
    "WIDTH",
    "ElementPlaces",
    "SumPlan",
    "mix",
    "plain",
    "sum_pieces",
]


# Signed sums of a tensor: the estimated distance is typically off by a third.
SKETCH = 8
WIDTH = 2 + SKETCH
# Elements of a row of sums.
_BLOCK = 256
# Rows per call on a CPU: enough that calls cost little, few enough to fit a cache.
_ROWS = {"cpu": 768}
# Rows per call on other devices.
_DEVICE_ROWS = 1 << 14
# Plans that are cached, at most.
_PLANS = 32
# Constants of splitmix64 (Steele et al., OOPSLA 2014), as signed 64-bit integers.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_KINDS = (torch.float32, torch.float64)
_MIX = (0xBF58476D1CE4E5B9 - (1 << 64), 0x94D049BB133111EB - (1 << 64))

# (elements, their places, whether they are float64)
Layout = tuple[int, "ElementPlaces", bool]


class ElementPlaces(NamedTuple):
    """Positions of a piece's elements in the whole tensor, in row-major order.

    Attributes:
        start: position of the first element; negative if unknown.
        run: number of contiguous elements, with `stride` from run to run (columns of a matrix: a run for each row);
            0: all are contiguous.
    """

    start: int
    run: int = 0
    stride: int = 0

    def whole_rows(self) -> bool:
        """Whether each run consists of whole rows of sums."""
        return not (self.start % _BLOCK or self.run % _BLOCK or self.stride % _BLOCK)

    def spans(self, row: int, rows: int) -> Iterator[tuple[int, int]]:
        """Yield (first row in the whole tensor, rows) for `rows` rows from `row` on."""
        run_rows = self.run // _BLOCK or row + rows
        while rows:
            number, within = divmod(row, run_rows)
            count = min(rows, run_rows - within)
            yield (self.start + number * self.stride) // _BLOCK + within, count
            row = row + count
            rows = rows - count


def mix(numbers: Tensor) -> Tensor:
    """Hash each number (the finaliser of splitmix64). int64 of any shape -> the same"""
    x = numbers * _GOLDEN
    x.bitwise_xor_((x >> 30).bitwise_and_(0x3FFFFFFFF)).mul_(_MIX[0])
    x.bitwise_xor_((x >> 27).bitwise_and_(0x1FFFFFFFFF)).mul_(_MIX[1])
    return x.bitwise_xor_((x >> 31).bitwise_and_(0x1FFFFFFFF))


def plain(tensor: Tensor, place: ElementPlaces) -> Tensor:
    """Convert to dense float32 or float64 in row-major order, without a copy if possible.

    Runs of `place` that are not whole rows are padded with zeros, which add nothing.
    """
    if tensor.layout is not torch.strided:
        tensor = tensor.to_dense()
    if tensor.dtype not in _KINDS:
        if tensor.is_complex():
            tensor = torch.view_as_real(tensor.resolve_conj())
        if tensor.dtype not in _KINDS:
            if tensor.is_floating_point():
                tensor = tensor.float()
            else:
                tensor = tensor.double()
    if place.run and not place.whole_rows():
        return torch.nn.functional.pad(tensor.reshape(-1, place.run), (0, place.stride - place.run))
    return tensor


def sum_pieces(pieces: Sequence[tuple[Tensor, ElementPlaces]]) -> Tensor:
    """Return a row of sums for each piece; the pieces are on one device.

    Returns:
        int64 [n, WIDTH], with the bits of floats.
    """
    if not pieces:
        return torch.zeros(0, WIDTH, dtype=torch.int64)
    plains = [plain(*piece) for piece in pieces]
    places = [position for _, position in pieces]
    device = plains[0].device
    key = (device, *((tensor.numel(), tensor.dtype, position) for tensor, position in zip(plains, places, strict=True)))
    plan = _plan_cache.get(key)
    if plan is None:
        if len(_plan_cache) >= _PLANS:
            _plan_cache.clear()
        plan = _plan_cache[key] = SumPlan(plains, places)
    return plan.run(plains)


_plan_cache: dict[tuple[Any, ...], "SumPlan"] = {}


@dataclass
class _Pack:
    """Rows that are summed in one call.

    Attributes:
        parts: sources of the rows in order: (piece, from, to), or (-1, 0, number of zeros).
        spans: (piece, its first row's position in the whole tensor in blocks, rows), in order.
        rows: number of rows.
    """

    wide: bool
    parts: list[tuple[int, int, int]] = field(default_factory=list)
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    rows: int = 0


@dataclass
class _FloatPacks:
    """Packs of one float dtype, and the factors of their rows.

    Attributes:
        owners: the piece of each row.
        odd: the odd number of each row (int32).
        signs: the signs of each row (float32 [SKETCH, rows]).
    """

    wide: bool
    packs: list[_Pack]
    owners: Tensor
    odd: Tensor
    signs: Tensor


class SumPlan:
    """Plan to cut pieces of certain sizes and places into rows, and sum them.

    Args:
        plains: the pieces, from `plain`; `run` takes others of the same sizes.
        places: their places.
    """

    def __init__(self, plains: Sequence[Tensor], places: Sequence[ElementPlaces]) -> None:
        device = plains[0].device
        self._count = len(plains)
        self._device = device
        self._sizes = [tensor.numel() for tensor in plains]
        layouts = []
        for tensor, position in zip(plains, places, strict=True):
            layouts.append((tensor.numel(), _place_of_rows(position), tensor.dtype == torch.float64))
        self._packs = _packs(layouts, _ROWS.get(device.type, _DEVICE_ROWS))
        kinds = []
        for wide in (False, True):
            kinds.append((wide, [pack for pack in self._packs if pack.wide is wide]))
        self._sides = [_FloatPacks(wide, packs, *_constants(packs, device)) for wide, packs in kinds if packs]
        self._zeros = {dtype: torch.zeros(_BLOCK, device=device, dtype=dtype) for dtype in _KINDS}
        self._tables = {side.wide: _tables(side.wide, device) for side in self._sides}
        # Each piece that is cut is flattened once.
        uncut = {(piece, 0, size) for piece, size in enumerate(self._sizes)}
        self._cut = sorted(
            {source[0] for pack in self._packs for source in pack.parts if source[0] >= 0 and source not in uncut}
        )

    def run(self, plains: list[Tensor]) -> Tensor:
        """Return a row for each piece. int64 [n, WIDTH]; floats by their bits."""
        for piece in self._cut:
            plains[piece] = plains[piece].reshape(-1)
        total = torch.zeros(self._count, WIDTH, dtype=torch.int64, device=self._device)
        for side in self._sides:
            self._add(total, side, plains)
        # A digest has 32 bits.
        total[:, 0].bitwise_and_(0xFFFFFFFF)
        return total

    def _add(self, total: Tensor, side: _FloatPacks, plains: Sequence[Tensor]) -> None:
        """Add the hashes, squares and signed sums of a side's rows to their pieces."""
        count = len(side.owners)
        dtype = _KINDS[side.wide]
        hashes = _scratch("hashes", count, 1, torch.int32, self._device).view(-1)
        lengths = _scratch("lengths", count, 1, dtype, self._device).view(-1)
        sketches = _scratch("sketches", count, SKETCH, dtype, self._device).view(SKETCH, count)
        end = 0
        for pack in side.packs:
            rows = self._rows(pack, plains)
            begin = end
            end = end + rows.shape[0]
            self._hash(rows, side.wide, hashes[begin:end])
            torch.linalg.vector_norm(rows, dim=1, out=lengths[begin:end])
            _sketch(rows, self._tables[side.wide][1], sketches[:, begin:end])
        numbers = total.view(torch.float64)
        total[:, 0].index_add_(0, side.owners, (hashes * side.odd).long())
        numbers[:, 1].index_add_(0, side.owners, lengths.double().square_())
        numbers[:, 2:].index_add_(0, side.owners, (sketches * side.signs).t().double())

    def _hash(self, rows: Tensor, wide: bool, out: Tensor) -> None:
        words = rows.view(torch.int32)
        mixed_words, shifted = (
            _scratch(use, rows.shape[0], words.shape[1], torch.int32, self._device) for use in ("mixed", "shifted")
        )
        # A hash of each word by its position: multiply by an odd number, shift, xor.
        torch.mul(words, self._tables[wide][0], out=mixed_words)
        torch.bitwise_right_shift(mixed_words, 15, out=shifted)
        torch.bitwise_xor(mixed_words, shifted, out=shifted)
        torch.sum(shifted, 1, dtype=torch.int32, out=out)

    def _rows(self, pack: _Pack, plains: Sequence[Tensor]) -> Tensor:
        if len(pack.parts) == 1:
            piece, begin, end = pack.parts[0]
            if (end - begin) % _BLOCK == 0 and plains[piece].is_contiguous():
                return plains[piece].view(-1)[begin:end].view(-1, _BLOCK)
        dtype = torch.float64 if pack.wide else torch.float32
        zeros = self._zeros[dtype]
        parts = []
        for piece, begin, end in pack.parts:
            if piece < 0:
                parts.append(zeros[:end])
            else:
                flat = plains[piece]
                flat = flat if flat.ndim == 1 else flat.reshape(-1)
                parts.append(flat if end - begin == self._sizes[piece] else flat[begin:end])
        rows = _scratch("rows", pack.rows, _BLOCK, dtype, self._device)
        torch.cat(parts, out=rows.view(-1))
        return rows


def _place_of_rows(place: ElementPlaces) -> ElementPlaces:
    """Return the place of a piece after `plain`."""
    if place.start < 0:
        return ElementPlaces(0)
    if place.whole_rows():
        return place
    return ElementPlaces(place.start)


def _packs(layouts: Sequence[Layout], most: int) -> list[_Pack]:
    """Cut the pieces into packs of about `most` rows."""
    packs: list[_Pack] = []
    for wide in (False, True):
        open_pack = _Pack(wide)
        for piece, (count, position, is_wide) in enumerate(layouts):
            if is_wide is not wide or not count:
                continue
            start = position.start
            lead = position.start % _BLOCK
            # `head` completes the row of the whole tensor in which the piece begins.
            head = min(count, (_BLOCK - lead) % _BLOCK if lead else 0)
            middle = (count - head) // _BLOCK
            cuts = [(0, head)] if head else []
            # A small piece is copied next to others, which is cheaper than operations of its own.
            if middle <= most // 2 and not position.run:
                cuts = [(0, count)]
            else:
                for row in range(0, middle, most):
                    rows = min(most, middle - row)
                    offset = head + row * _BLOCK
                    origin = position if position.run else ElementPlaces(start + head)
                    spans = [(piece, *span) for span in origin.spans(row, rows)]
                    packs.append(_Pack(wide, [(piece, offset, offset + rows * _BLOCK)], spans, rows))
                if head + middle * _BLOCK < count:
                    cuts.append((head + middle * _BLOCK, count))
            for begin, end in cuts:
                _append(open_pack, piece, begin, end, start)
                if open_pack.rows >= most:
                    packs.append(open_pack)
                    open_pack = _Pack(wide)
        if open_pack.rows:
            packs.append(open_pack)
    return packs


def _append(pack: _Pack, piece: int, begin: int, end: int, start: int) -> None:
    """Append elements of a piece to a pack, padded with zeros to whole rows.

    Args:
        begin, end: the first of the elements, and the one after the last.
    """
    lead = (start + begin) % _BLOCK
    if lead:
        pack.parts.append((-1, 0, lead))
    pack.parts.append((piece, begin, end))
    rows = -(-(lead + end - begin) // _BLOCK)
    if rows * _BLOCK > lead + end - begin:
        pack.parts.append((-1, 0, rows * _BLOCK - lead - (end - begin)))
    first_row = (start + begin) // _BLOCK
    pack.spans.append((piece, first_row, rows))
    pack.rows += rows


def _constants(packs: Sequence[_Pack], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Return the piece, the odd number and the signs of each row.

    Returns:
        int64 [rows], int32 [rows], float32 [SKETCH, rows].
    """
    spans = torch.tensor([span for pack in packs for span in pack.spans], dtype=torch.int64).reshape(-1, 3)
    pieces, firsts, rows = spans.unbind(1)
    owners = pieces.repeat_interleave(rows)
    numbers = torch.arange(len(owners)) - (rows.cumsum(0) - rows - firsts).repeat_interleave(rows)
    numbers = mix(numbers + 1)
    odd = ((numbers >> 16) | 1).to(torch.int32)
    signs = (((numbers >> torch.arange(SKETCH).unsqueeze(1)) & 1) * 2 - 1).to(torch.float32)
    return owners.to(device), odd.to(device), signs.to(device)


def _tables(wide: bool, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return each word's odd number in a row, and each element's signs.

    Returns:
        int32 [words], float [SKETCH, _BLOCK].
    """
    # The factors 31 and 77 only make the two tables differ.
    numbers = mix(torch.arange(1, _BLOCK * (2 if wide else 1) + 1) * 31)
    odd = ((numbers >> 16) | 1).to(torch.int32)
    signs = ((mix(torch.arange(1, _BLOCK + 1) * 77) >> torch.arange(SKETCH).unsqueeze(1)) & 1) * 2 - 1
    return odd.to(device), signs.to(device, torch.float64 if wide else torch.float32)


def _scratch(use: str, rows: int, width: int, kind: torch.dtype, device: torch.device) -> Tensor:
    """Return reused memory for rows and intermediate results: new pages cost more than the arithmetic."""
    key = (use, width, kind, device)
    memory = _scratch_cache.get(key)
    if memory is None or memory.shape[0] < rows:
        memory = _scratch_cache[key] = torch.empty(rows, width, dtype=kind, device=device)
    if memory.shape[0] == rows:
        return memory
    return memory[:rows]


_scratch_cache: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}


def _sketch(rows: Tensor, table: Tensor, out: Tensor) -> None:
    """Compute table @ rows.T without rounded products, whatever the matmul precision."""
    if rows.device.type != "cpu":
        for index in range(SKETCH):
            torch.sum(rows * table[index], 1, out=out[index])
    elif rows.dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        out.copy_(torch.mm(table.double(), rows.double().t()))
    else:
        torch.mm(table, rows.t(), out=out)
