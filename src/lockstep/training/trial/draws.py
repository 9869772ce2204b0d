"""Draw for parts of a batch the random numbers of their samples in the whole.

    book = DrawBook()
    with RowDraws(book, samples=8):                           # the whole; the generators are seeded before
        loss(model, whole).backward()
    with RowDraws(book, samples=8, start=0, count=4):         # its first half; the generators have the same seed
        loss(model, half).backward()

So a loss with dropout, noise or masks can be compared exactly with its parts. No numbers are stored: each random
operation takes a key from the CPU's default generator, draws the numbers of the WHOLE from that key, and returns the
rows of its samples. A checkpointed block that is recomputed in the backward gets the same keys, since torch restores
that generator, so it gets the same numbers.

A part gets all numbers if it requests the same shape as the whole; otherwise it gets the rows of its samples
along the one dimension that is a multiple of them. Where neither holds, as for a permutation of the batch, its
operation is noted in `uncut`.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, final

import torch
from torch import Generator, Tensor

# Private: torch has no public name for dispatch modes.
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["CONTIGUOUS", "DrawBook", "Layout", "RowDraws"]

# Number of keys: a key fits into an int64.
_KEYS = 2**62


class Layout(NamedTuple):
    """How rows that are a multiple of the samples belong to them.

    Attributes:
        views: the rows are copies of the batch, one after the other, as `torch.cat([x, x])` has them; else each
            sample's rows are together.
        last: a part padded to a shorter length has the last of the whole's positions; else the first.
    """

    views: bool = False
    last: bool = False


CONTIGUOUS = Layout()


class DrawBook:
    """What the whole drew: shapes by key, and the task's own generators.

    Attributes:
        shapes: (key, operation) -> the shape of its numbers in the whole.
        has_views: a part had several rows for a sample, which may be in another layout.
        has_lengths: a part was shorter in another dimension, so its places may be the whole's last.
    """

    def __init__(self) -> None:
        self.shapes: dict[tuple[int, str], torch.Size] = {}
        self.has_views = self.has_lengths = False
        self._own: dict[int, tuple[Generator, Tensor]] = {}

    def rewind(self, generator: Generator) -> None:
        """Set a generator of the task's own to where the whole found it."""
        _, state = self._own.setdefault(id(generator), (generator, generator.get_state()))
        generator.set_state(state)

    def restore(self) -> None:
        """Restore the task's own generators."""
        for generator, state in self._own.values():
            generator.set_state(state)


@final
# The base class has no annotations.
class RowDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Mode in which random operations give the rows of some samples.

    Args:
        book: written by the whole, read by its parts.
        samples: of the whole.
        start, count: this part's samples; None: the whole.
        layout: of rows that are a multiple of the samples.

    Attributes:
        uncut: operations whose numbers could not be cut.
    """

    supports_higher_order_operators = True

    def __init__(
        self, book: DrawBook, samples: int, start: int = 0, count: int | None = None, layout: Layout = CONTIGUOUS
    ) -> None:
        # Its constructor has none either.
        super().__init__()  # type: ignore[no-untyped-call]
        self._book = book
        self._samples = samples
        self._layout = layout
        self._start = start
        self._count = samples if count is None else count
        self._is_whole = count is None
        self._rewound: set[int] = set()
        self.uncut = list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in getattr(func, "tags", ()):
            return func(*args, **kwargs)
        name = func.overloadpacket.__name__
        values = _bind(func, args, kwargs)
        if name == "_fused_sdp_choice" or _is_off(values):
            # It draws nothing.
            return func(*args, **kwargs)
        draw = _DRAWS.get(name)
        result = draw(self, name, values) if draw else None
        if result is None:
            self._note(name)
            return func(*args, **kwargs)
        return result

    def numbers(
        self,
        name: str,
        values: Mapping[str, Any],
        like: "_Form",
        fill: Callable[[Tensor, Generator], Any],
        *,
        by_rows: bool = True,
    ) -> Tensor:
        """Return the numbers of this part's samples.

        Args:
            name: of the operation.
            values: its arguments by name.
            like: the form of the numbers asked for.
            fill: fills a tensor of the whole's form from a generator.
            by_rows: the numbers have rows for samples; else only the same shape as in the whole will do.
        """
        key = self._key(values.get("generator"))
        whole = self._whole_shape(key, name, like.shape, by_rows)
        drawn = torch.empty(whole, dtype=like.dtype, device=like.device)
        fill(drawn, Generator(like.device).manual_seed(key))
        return self._cut(drawn, like.shape)

    def _key(self, generator: Generator | None) -> int:
        if generator is None:
            return int(torch.randint(_KEYS, (), device="cpu"))
        if id(generator) not in self._rewound:
            self._rewound.add(id(generator))
            self._book.rewind(generator)
        key = torch.randint(_KEYS, (), generator=generator, device=generator.device)
        # Waits for the device if the generator is there.
        return int(key)

    def _whole_shape(self, key: int, name: str, shape: torch.Size, by_rows: bool) -> torch.Size:
        if self._is_whole:
            return self._book.shapes.setdefault((key, name), shape)
        whole = self._book.shapes.get((key, name))
        if whole is None or (whole != shape and not (by_rows and self._row_dim(whole, shape) is not None)):
            self._note(name)
            return shape
        return whole

    def _row_dim(self, whole: torch.Size, shape: torch.Size) -> int | None:
        """Return the dimension of the samples, whose length is a multiple of them.

        The other dimensions are as long as in the whole, or shorter.
        """
        if len(whole) != len(shape) or any(a < b for a, b in zip(whole, shape, strict=True)):
            return None
        dims = []
        for k, size in enumerate(whole):
            if self._rows_each(size) * self._count == shape[k] and size:
                dims.append(k)
        exact = []
        for k in dims:
            if whole[:k] == shape[:k] and whole[k + 1 :] == shape[k + 1 :]:
                exact.append(k)
        return next(iter(exact or dims), None)

    def _rows_each(self, rows: int) -> float:
        if rows % self._samples:
            return math.nan
        return rows // self._samples

    def _cut(self, drawn: Tensor, shape: torch.Size) -> Tensor:
        if drawn.shape == shape:
            return drawn
        dim = self._row_dim(drawn.shape, shape)
        assert dim is not None
        rows = drawn.shape[dim] // self._samples
        self._book.has_views |= rows > 1
        if self._layout.views:
            copies = drawn.view(*drawn.shape[:dim], rows, self._samples, *drawn.shape[dim + 1 :])
            drawn = copies.narrow(dim + 1, self._start, self._count).flatten(dim, dim + 1)
        else:
            drawn = drawn.narrow(dim, self._start * rows, self._count * rows)
        for k, size in enumerate(shape):
            if drawn.shape[k] != size:
                self._book.has_lengths = True
                drawn = drawn.narrow(k, drawn.shape[k] - size if self._layout.last else 0, size)
        return drawn.contiguous()

    def _note(self, name: str) -> None:
        if not self._is_whole and name not in self.uncut:
            self.uncut.append(name)


class _Form(NamedTuple):
    """Shape, dtype and device of numbers."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def _bind(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Return an operation's arguments by name, with defaults.

    The default of `dtype` is left out, because the schema has it as a number.
    """
    # Private: torch has no other way to the names of an operation's arguments.
    schema = func._schema.arguments
    defaults = {}
    for argument in schema:
        if argument.has_default_value() and argument.name != "dtype":
            defaults[argument.name] = argument.default_value
    values: dict[str, Any] = defaults | {argument.name: value for argument, value in zip(schema, args, strict=False)}
    values.update(kwargs)
    return values


def _is_off(values: Mapping[str, Any]) -> bool:
    """Whether these arguments turn an operation's dropout off."""
    flags = (values.get("train"), values.get("training"))
    return False in flags or 0 in (values.get("dropout_p"), values.get("dropout"))


def _create_form(values: Mapping[str, Any], dtype: torch.dtype | None = None) -> _Form:
    """Return the form of a tensor that an operation creates: from `size`, or like `self`."""
    like = values.get("self")
    if isinstance(like, Tensor):
        default = like.dtype
        device = like.device
        shape = like.shape
    else:
        default = dtype or torch.get_default_dtype()
        device = torch.device("cpu")
        shape = torch.Size(values["size"])
    return _Form(shape, values.get("dtype") or default, torch.device(values.get("device") or device))


def _form(tensor: Tensor, dtype: torch.dtype | None = None) -> _Form:
    return _Form(tensor.shape, dtype or tensor.dtype, tensor.device)


Values = Mapping[str, Any]


def _uniform(draws: RowDraws, name: str, values: Values) -> Tensor:
    return draws.numbers(name, values, _create_form(values), lambda t, g: t.uniform_(generator=g))


def _normal(draws: RowDraws, name: str, values: Values) -> Tensor:
    return draws.numbers(name, values, _create_form(values), lambda t, g: t.normal_(generator=g))


def _integers(draws: RowDraws, name: str, values: Values) -> Tensor | None:
    low = values.get("low", 0)
    high = values["high"]
    if isinstance(high, Tensor):
        return None
    form = _create_form(values, torch.int64)
    return draws.numbers(name, values, form, lambda t, g: t.random_(low, high, generator=g))


def _permutation(draws: RowDraws, name: str, values: Values) -> Tensor:
    device = torch.device(values.get("device") or "cpu")
    form = _Form(torch.Size([values["n"]]), values.get("dtype") or torch.int64, device)
    # A lambda, because `numbers` calls it with a tensor and a generator.
    fill = lambda t, g: t.copy_(torch.randperm(len(t), generator=g, device=device))  # noqa: E731
    # A permutation has indices, not rows of samples.
    return draws.numbers(name, values, form, fill, by_rows=False)


def _scaled_normal(draws: RowDraws, name: str, values: Values) -> Tensor:
    mean = values["mean"]
    std = values["std"]
    if "size" in values:
        numbers = _normal(draws, name, values)
    else:
        numbers = draws.numbers(name, values, _form(mean + std), lambda t, g: t.normal_(generator=g))
    return numbers.mul_(std).add_(mean)


def _below(draws: RowDraws, name: str, values: Values, like: Tensor, p: Any) -> Tensor:
    """Draw uniform numbers of the form of `like`; return where they are below `p`."""
    uniform = draws.numbers(name, values, _form(like, torch.float32), lambda t, g: t.uniform_(generator=g))
    return torch.lt(uniform, p)


def _bernoulli(draws: RowDraws, name: str, values: Values) -> Tensor:
    like: Tensor = values["self"]
    return _below(draws, name, values, like, values.get("p", like)).to(like.dtype)


def _bernoulli_in_place(draws: RowDraws, name: str, values: Values) -> Tensor:
    target: Tensor = values["self"]
    return target.copy_(_below(draws, name, values, target, values["p"]))


def _dropout(draws: RowDraws, name: str, values: Values) -> tuple[Tensor, Tensor]:
    like: Tensor = values["input"]
    keep = 1 - values["p"]
    mask = _below(draws, name, values, like, keep)
    return like * mask * (1 / keep if keep else 0.0), mask


def _fused_dropout(draws: RowDraws, name: str, values: Values) -> tuple[Tensor, Tensor]:
    like = values["self"]
    keep = values["p"]
    mask = _below(draws, name, values, like, keep)
    return like * mask * (1 / keep if keep else 0.0), mask.to(torch.uint8)


def _multinomial(draws: RowDraws, name: str, values: Values) -> Tensor:
    weights: Tensor = values["self"].float()
    count: int = values["num_samples"]
    if values["replacement"]:
        form = _Form(torch.Size([*weights.shape[:-1], count]), weights.dtype, weights.device)
        uniform = draws.numbers(name, values, form, lambda t, g: t.uniform_(generator=g))
        sums = weights.cumsum(-1)
        places = torch.searchsorted(sums, uniform * sums[..., -1:], right=True)
        return places.clamp_(max=weights.shape[-1] - 1)
    # The smallest of exponential times, each divided by its weight, are draws without replacement.
    has_rows, fill = weights.ndim > 1, lambda t, g: t.exponential_(generator=g)
    # Without rows, another count is another draw.
    operation = name if has_rows else f"{name} of {count}"
    times = draws.numbers(operation, values, _form(weights), fill, by_rows=has_rows)
    return torch.topk(weights / times, count, dim=-1).indices


def _in_place(draws: RowDraws, name: str, values: Values) -> Tensor:
    """Fill a tensor in place by the operation itself, on the whole's form."""
    target: Tensor = values["self"]
    return target.copy_(_fill(draws, name, values))


def _fill(draws: RowDraws, name: str, values: Values) -> Tensor:
    settings = {}
    for key, value in values.items():
        if key not in ("self", "generator"):
            settings[key] = value
    # `from` is a keyword of Python, so these arguments are passed by position.
    numbers = []
    for key in ("from", "to"):
        if key in settings:
            numbers.append(settings.pop(key))
    fill = getattr(Tensor, f"{name.removesuffix('_')}_")
    return draws.numbers(name, values, _form(values["self"]), lambda t, g: fill(t, *numbers, **settings, generator=g))


_FILLS = ("uniform", "normal", "exponential", "random", "log_normal", "geometric", "cauchy")
# Operation -> its numbers for this part; None: it cannot be cut.
_DRAWS: dict[str, Callable[[RowDraws, str, Values], Any]] = {
    "rand": _uniform,
    "rand_like": _uniform,
    "randn": _normal,
    "randn_like": _normal,
    "randint": _integers,
    "randint_like": _integers,
    "randperm": _permutation,
    "bernoulli": _bernoulli,
    "bernoulli_": _bernoulli_in_place,
    "native_dropout": _dropout,
    "_fused_dropout": _fused_dropout,
    "multinomial": _multinomial,
    **{f"{name}_": _in_place for name in _FILLS},
    **dict.fromkeys(_FILLS, _fill),
    "normal": _scaled_normal,
}
