"""Read weights that other libraries saved, without running a pickle.

    with open_foreign(Path("last.ckpt")) as weights:
        names = match_names(weights, model.state_dict(), ties)      # by rule; refuses what does not fit
        fill(weights, names, model.state_dict())

Formats: folders of torch.distributed.checkpoint (DCP), Lightning's .ckpt, folders of Hugging Face (safetensors, or
pytorch_model.bin), and state dicts in a .safetensors or torch file. Only tensors are read; one full tensor is in memory
at a time.

Names follow two rules. What a wrapper adds is removed: `_orig_mod.`, `_fsdp_wrapped_module.`,
`_checkpoint_wrapped_module.`, anywhere. Of the names, those with one prefix made of `module.`, `model.`, `state_dict.`
or `_forward_module.` are the model's: the prefix that gives every tensor of the model; two that do are refused. Where
none does, the one other prefix that does is removed, such as `net.` or `app.model.`.
"""

import fnmatch
import importlib
import pickle
import warnings
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.checkpoint.files import parse_json, read_file
from lockstep.checkpoint.format import CODES, JSON_LIMIT, MANIFEST, dtype_name
from lockstep.checkpoint.layout import parts_of
from lockstep.checkpoint.read import Differences, advise_drop, list_names
from lockstep.errors import CheckpointError
from lockstep.files import printable, refusal_error
from lockstep.tensors import as_bytes

__all__ = [
    "fill",
    "is_foreign",
    "match_names",
    "open_foreign",
    "select_names",
    "write_dcp",
]

# The metadata file of DCP.
_METADATA = ".metadata"
_INDEX = "model.safetensors.index.json"
# Weights of Hugging Face without safetensors. Several such files have an index.
_BIN = "pytorch_model.bin"
_BIN_INDEX = f"{_BIN}.index.json"
_TORCH_SUFFIXES = (".ckpt", ".pt", ".pth", ".bin")
_WRAPPERS = ("_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module")
_PREFIXES = ("module", "model", "state_dict", "_forward_module")
# Keys of a torch file that may hold the model's state dict.
_NESTED = ("state_dict", "model_state_dict", "model")
_DTYPES = {code: name for name, code in CODES.items()}
# dtype -> the dtypes that can hold each of its values
_WIDER = {
    "float16": ("float32", "float64"),
    "bfloat16": ("float32", "float64"),
    "float32": ("float64",),
}


class TensorForm(NamedTuple):
    """The dtype's name and the shape of a tensor."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class ForeignWeights:
    """Weights in another library's format.

    Attributes:
        path: the file or folder.
        kind: the format, for messages.
        tensors: form of each tensor by its name in the file.
        aliases: second name of a tied tensor -> the name it is stored under.
        read: name -> the tensor, read at each call.
        read_part: name and a slice of each dimension -> that part; of the file no more than the format allows is read.
        others: names of the file's entries that are no tensors.
    """

    path: Path
    kind: str
    tensors: dict[str, TensorForm]
    aliases: dict[str, str]
    read: Callable[[str], Tensor]
    read_part: Callable[[str, tuple[slice, ...]], Tensor]
    others: list[str]


@dataclass(frozen=True, slots=True)
class NameMatch:
    """The tensor of a file for each tensor of a model.

    Attributes:
        source: the model's name -> the file's.
        prefix: removed from the file's names.
        unused: names in the file that belong to no part of the model.
        widened: names of the model's tensors with a wider dtype than the file's.
    """

    source: dict[str, str]
    prefix: str
    unused: list[str]
    widened: list[str]

    def __str__(self) -> str:
        parts = [f"{len(self.source)} tensors"]
        if self.prefix:
            parts.append(f"the prefix {self.prefix!r} removed")
        if self.widened:
            parts.append(f"{len(self.widened)} converted to a wider dtype (such as {printable(self.widened[0], 80)})")
        if self.unused:
            parts.append(f"{len(self.unused)} others not used (such as {printable(self.unused[0], 80)})")
        return ", ".join(parts)


# --- formats


def is_foreign(path: Path) -> bool:
    """Whether `path` has another library's format, and is not lockstep's."""
    if path.is_dir():
        if (path / MANIFEST).exists() or (path / "checkpoints").is_dir():
            return False
        return any(path.glob("*.safetensors")) or any(
            (path / name).is_file() for name in (_METADATA, _INDEX, _BIN, _BIN_INDEX)
        )
    return path.is_file()


@contextmanager
def open_foreign(path: Path) -> Iterator[ForeignWeights]:
    """Open weights in another library's format, which the files show.

    Raises:
        CheckpointError: an unknown format, a missing or damaged file, or one that needs a pickle to be run.
    """
    with ExitStack() as stack:
        try:
            if path.is_dir() and (path / _METADATA).is_file():
                weights = _open_dcp(path)
            elif path.is_dir() and not any(path.glob("*.safetensors")) and not (path / _INDEX).is_file():
                weights = _open_bins(path)
            elif path.is_dir():
                weights = _open_safetensors(path, *_shards(path), "a folder of safetensors", stack)
            elif path.suffix == ".safetensors":
                weights = _open_safetensors(path, {path.name: []}, {}, "a safetensors file", stack)
            elif path.suffix in _TORCH_SUFFIXES:
                weights = _open_torch(path)
            else:
                raise CheckpointError(
                    f"{printable(str(path))}: its format is unknown; give a DCP folder, a folder or file of "
                    f"safetensors, or "
                    f"a torch file ({', '.join(_TORCH_SUFFIXES)})"
                )
        except OSError as error:
            raise refusal_error(error) from error
        if not weights.tensors:
            raise CheckpointError(f"{printable(str(path))} is {weights.kind} without a tensor; give another file")
        yield weights


def _shards(folder: Path) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the safetensors files with their indexed names, and the index's notes.

    Without an index the names are [], and all that a file has is taken.

    Raises:
        CheckpointError: a shard is missing, or several files are there without an index.
    """
    label = printable(str(folder))
    index = folder / _INDEX
    if not index.is_file():
        files = sorted(path.name for path in folder.glob("*.safetensors"))
        if "model.safetensors" in files:
            files = ["model.safetensors"]
        if len(files) != 1:
            listing = ", ".join(files[:3]) or "none"
            raise CheckpointError(
                f"{label} has no {_INDEX} and no model.safetensors; its safetensors files are: {listing}; "
                "give one of them"
            )
        return {files[0]: []}, {}
    return _read_index(index, ".safetensors")


def _read_index(index: Path, suffix: str) -> tuple[dict[str, list[str]], dict[str, Any]]:
    """Return the files and tensors of Hugging Face's index, and its notes.

    Raises:
        CheckpointError: it is damaged, or a file is missing.
    """
    folder = index.parent
    label = printable(str(index.parent))
    content = parse_json(read_file(index, JSON_LIMIT), index)
    names = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
        raise CheckpointError(f"{label}/{index.name} is damaged: it has no weight_map")
    shards: dict[str, list[str]] = {}
    for name, file in names.items():
        if Path(file).name != file or not file.endswith(suffix):
            raise CheckpointError(f"{label}/{index.name} names {printable(file, 80)!r}, which is no file of the folder")
        if not (folder / file).is_file():
            raise CheckpointError(f"{label}/{file} is missing; download the folder again")
        shards.setdefault(file, []).append(name)
    notes = content.get("metadata")
    return shards, notes if isinstance(notes, dict) else {}


def _open_safetensors(
    path: Path, shards: Mapping[str, list[str]], notes: dict[str, Any], kind: str, stack: ExitStack
) -> ForeignWeights:
    """Open safetensors files; `notes` and their headers name second names of tied tensors."""
    folder = path if path.is_dir() else path.parent
    tensors = dict[str, TensorForm]()
    opened = dict[str, Any]()
    for file, expected in shards.items():
        label = printable(f"{folder.name}/{file}")
        try:
            reader = stack.enter_context(safe_open(folder / file, framework="pt"))
        except SafetensorError as error:
            raise CheckpointError(f"{label} is damaged: {printable(str(error), 120)}") from error
        there = set(reader.keys())
        if missing := sorted(set(expected) - there):
            raise CheckpointError(f"{label} has no {printable(missing[0], 120)}, which {_INDEX} expects in it")
        for name in sorted(expected or there):
            view = reader.get_slice(name)
            if view.get_dtype() not in _DTYPES:
                raise CheckpointError(
                    f"{label}: {printable(name, 120)} has the dtype {view.get_dtype()}, which lockstep does not store"
                )
            tensors[name] = TensorForm(_DTYPES[view.get_dtype()], tuple(view.get_shape()))
            opened[name] = reader
        notes = notes | (reader.metadata() or {})
    aliases = {alias: str(name) for alias, name in notes.items() if name in tensors and alias not in tensors}

    def read_part(name: str, cut: tuple[slice, ...]) -> Tensor:
        if any(span.start >= span.stop for span in cut) or not cut:
            # safetensors cannot slice a scalar or cut an empty part, and has no annotations.
            return opened[name].get_tensor(name)[cut]  # type: ignore[no-any-return]
        # This reads only the part from the file.
        return opened[name].get_slice(name)[cut]  # type: ignore[no-any-return]

    return ForeignWeights(path, kind, tensors, aliases, lambda name: opened[name].get_tensor(name), read_part, [])


def _open_bins(folder: Path) -> ForeignWeights:
    """Open the torch files of a folder of Hugging Face."""
    index = folder / _BIN_INDEX
    if index.is_file():
        files = sorted(_read_index(index, ".bin")[0])
    else:
        files = [_BIN]
    parts = [_open_torch(folder / file) for file in files]
    owner = {name: file_weights for file_weights in parts for name in file_weights.tensors}
    forms = {}
    for name, file_weights in owner.items():
        forms[name] = file_weights.tensors[name]
    return ForeignWeights(
        *(folder, "a folder of torch files", forms, {}),
        read=lambda name: owner[name].read(name),
        read_part=lambda name, cut: owner[name].read_part(name, cut),
        others=[name for file_weights in parts for name in file_weights.others],
    )


def _open_torch(path: Path) -> ForeignWeights:
    """Open a file of torch.save, with weights_only: nothing in it is run."""
    label = printable(str(path))
    try:
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(path))
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{label} has Python objects besides tensors, which would have to be run to be read; write its "
            f"weights alone: "
            "torch.save(model.state_dict(), FILE)"
        ) from error
    except OSError:
        raise
    except Exception as error:
        # torch runs a file of another kind as pickle instructions, which fail in any way.
        raise CheckpointError(f"{label} is no torch file, or is damaged; write it again") from error
    description, state, rest = _state_dict_in(content, label)
    tensors = {}
    for name, tensor in state.items():
        if isinstance(tensor, Tensor):
            tensors[name] = tensor
    forms = {}
    for name, tensor in tensors.items():
        forms[name] = TensorForm(dtype_name(tensor.dtype), tuple(tensor.shape))
    others = [str(name) for name in state if name not in tensors] + rest
    # The tensors are mapped: only the parts in use are read.
    return ForeignWeights(
        path, description, forms, {}, tensors.__getitem__, lambda name, cut: tensors[name][cut], others
    )


def _state_dict_in(content: Any, label: str) -> tuple[str, dict[str, Any], list[str]]:
    """Return the kind of file, its state dict, and the other keys."""
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise CheckpointError(f"{label} holds a {type(content).__name__}, not a state dict; write one")
    state_dicts = []
    for key, value in content.items():
        if _is_state_dict(value):
            state_dicts.append(key)
    # A tensor next to a state dict is a loss or a counter.
    nested = [key for key in state_dicts if key in _NESTED] or state_dicts
    if not nested and _is_state_dict(content):
        return "a state dict", content, []
    if len(nested) != 1:
        keys = ", ".join(printable(key, 40) for key in (nested or list(content))[:5])
        if nested:
            problem = f"has state dicts under {keys}"
        else:
            problem = f"has no state dict; its keys are: {keys}"
        raise CheckpointError(f"{label} {problem}; write the one to load: torch.save(content[KEY], FILE)")
    if "pytorch-lightning_version" in content:
        description = "a Lightning checkpoint"
    else:
        description = f"a torch file ({nested[0]!r})"
    return description, content[nested[0]], [key for key in content if key != nested[0]]


def _is_state_dict(content: Any) -> bool:
    is_named = isinstance(content, dict) and all(isinstance(key, str) for key in content)
    return is_named and any(isinstance(value, Tensor) for value in content.values())


# --- torch.distributed.checkpoint


class _MetadataUnpickler(pickle.Unpickler):
    """Reads DCP's metadata, and constructs nothing but its own classes."""

    _NAMES = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("collections", "OrderedDict"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
            *(
                ("torch.distributed.checkpoint.metadata", name)
                for name in (
                    *("Metadata", "MetadataIndex", "TensorStorageMetadata", "BytesStorageMetadata"),
                    *("ChunkStorageMetadata", "TensorProperties", "_MEM_FORMAT_ENCODING", "StorageMeta"),
                )
            ),
            *(("pathlib", name) for name in ("PosixPath", "PurePosixPath", "Path")),
            *(("pathlib._local", name) for name in ("PosixPath", "PurePosixPath", "Path")),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in self._NAMES or (module == "torch" and isinstance(getattr(torch, name, 0), torch.dtype)):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"{module}.{name}")


def _dcp_metadata(path: Path, label: str) -> Any:
    """Read the metadata of a DCP folder, and check that its files are there."""
    try:
        with open(path / _METADATA, "rb") as file:
            metadata = _MetadataUnpickler(file).load()
        dict(metadata.state_dict_metadata)
        files = {Path(info.relative_path) for info in metadata.storage_data.values()}
    except pickle.UnpicklingError as error:
        raise CheckpointError(
            f"{label}/{_METADATA} needs {printable(str(error), 80)}, which is not DCP's own; it is not read"
        ) from error
    except (AttributeError, EOFError, ImportError, IndexError, KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{label}/{_METADATA} is damaged; save the folder again") from error
    for data_file in sorted(files):
        if data_file.is_absolute() or ".." in data_file.parts:
            raise CheckpointError(f"{label}/{_METADATA} names {printable(str(data_file), 80)!r}, outside of the folder")
        if not (path / data_file).is_file():
            raise CheckpointError(f"{label}/{data_file} is missing; copy the whole folder")
    return metadata


def _open_dcp(path: Path) -> ForeignWeights:
    label = printable(str(path))
    dcp = importlib.import_module("torch.distributed.checkpoint")
    metadata = _dcp_metadata(path, label)
    entries = dict(metadata.state_dict_metadata)
    forms = {
        name: TensorForm(dtype_name(entry.properties.dtype), tuple(entry.size))
        for name, entry in entries.items()
        if isinstance(entry, dcp.metadata.TensorStorageMetadata)
    }

    # DCP is imported late, so mypy does not know the base class.
    class MetadataReader(dcp.FileSystemReader):  # type: ignore[misc, name-defined]
        """Takes the metadata that was read above; torch's own would run its pickle."""

        def read_metadata(self, *_: Any, **__: Any) -> Any:
            metadata.storage_meta = metadata.storage_meta or dcp.metadata.StorageMeta()
            metadata.storage_meta.load_id = self.load_id
            return metadata

    helpers = importlib.import_module("torch.distributed.checkpoint.planner_helpers")

    # Here too mypy does not know the base class.
    class BoxPlanner(dcp.DefaultLoadPlanner):  # type: ignore[misc, name-defined]
        """Fills one tensor with a box of a stored one.

        It reads the chunks that overlap the box.
        """

        def __init__(self, tensor: Tensor) -> None:
            super().__init__()
            self.tensor = tensor

        def resolve_tensor(self, read_item: Any) -> Tensor:
            places = zip(read_item.dest_offsets, read_item.lengths, strict=True)
            return self.tensor[tuple(slice(begin, begin + count) for begin, count in places)]

        def commit_tensor(self, *_: Any) -> None:
            pass

    def read_part(name: str, cut: tuple[slice, ...]) -> Tensor:
        offsets = [span.start for span in cut]
        sizes = [span.stop - span.start for span in cut]
        tensor = torch.empty(sizes, dtype=getattr(torch, forms[name].dtype))
        box = dcp.metadata.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        try:
            reader = MetadataReader(path)
            reader.set_up_storage_reader(reader.read_metadata(), is_coordinator=True)
            if tensor.numel():
                items = helpers.create_read_items_for_chunk_list(name, entries[name], [box])
            else:
                items = []
            reader.read_data(dcp.planner.LoadPlan(items), BoxPlanner(tensor)).wait()
        except (dcp.CheckpointException, RuntimeError, AssertionError, EOFError) as error:
            raise CheckpointError(f"{label}: {printable(name, 120)} cannot be read: its data is damaged") from error
        return tensor

    def read(name: str) -> Tensor:
        return read_part(name, tuple(slice(0, size) for size in forms[name].shape))

    return ForeignWeights(path, "a DCP folder", forms, {}, read, read_part, sorted(entries.keys() - forms.keys()))


@contextmanager
def _alone() -> Iterator[None]:
    """Silence DCP's warning that one process reads or writes, which is meant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def write_dcp(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write tensors as a DCP folder, from one process."""
    dcp = importlib.import_module("torch.distributed.checkpoint")
    with _alone():
        dcp.save(tensors, storage_writer=dcp.FileSystemWriter(folder), no_dist=True)


# --- names


def _strip_wrappers(name: str) -> str:
    return ".".join(component for component in name.split(".") if component not in _WRAPPERS)


def _plain_names(weights: ForeignWeights) -> dict[str, str]:
    """Return {name without wrappers: name in the file}, aliases of tied tensors included.

    Raises:
        CheckpointError: two names differ only by wrappers.
    """
    plain: dict[str, str] = {}
    for name in (*weights.tensors, *weights.aliases):
        short = _strip_wrappers(name)
        if short in plain:
            raise CheckpointError(
                f"{printable(str(weights.path))}: {printable(name, 120)} and {printable(plain[short], 120)} "
                f"are one name "
                "without their wrappers; remove one"
            )
        plain[short] = name
    return {short: weights.aliases.get(name, name) for short, name in plain.items()}


def _prefixes(names: Mapping[str, str]) -> list[str]:
    """Return the prefixes that may be removed, the shortest first: "", "model.", "module.model.", ..."""
    prefixes = {""}
    for name in names:
        parts = name.split(".")
        prefix = ""
        for component in parts[:-1]:
            if component not in _PREFIXES:
                break
            prefix += f"{component}."
            prefixes.add(prefix)
    return sorted(prefixes, key=lambda prefix: (prefix.count("."), prefix))


def _other_prefixes(names: Mapping[str, str], model: Mapping[str, Tensor]) -> list[str]:
    """Return the prefixes in a file's names before the first name that matches."""
    for wanted in model:
        if prefixes := [name.removesuffix(wanted) for name in names if name.endswith(f".{wanted}")]:
            return prefixes
    return []


def match_names(
    weights: ForeignWeights,
    model: Mapping[str, Tensor],
    ties: Mapping[str, str],
    leave: Callable[[str], bool] = lambda name: False,
) -> NameMatch:
    """Find the file's tensor of each tensor of a model, by the rules above.

    Args:
        model: by name; only dtypes and shapes matter.
        ties: second name of a tied tensor of the model -> its first; the file may have either, or both if equal.
        leave: whether a tensor of the model or the file is not wanted, by its name without the prefix.

    Raises:
        CheckpointError: tensors are missing, ambiguous, left over in a part of the model, or have another shape or a
            narrower dtype; up to three of each are named.
    """
    names = _plain_names(weights)
    label = printable(str(weights.path))
    model = {name: tensor for name, tensor in model.items() if not leave(name)}
    missing_by = {prefix: _missing(names, model, ties, prefix) for prefix in _prefixes(names)}
    complete = [prefix for prefix, missing in missing_by.items() if not missing]
    if not complete:
        missing_by |= {prefix: _missing(names, model, ties, prefix) for prefix in _other_prefixes(names, model)}
        complete = [prefix for prefix, missing in missing_by.items() if not missing]
    if len(complete) > 1:
        raise CheckpointError(
            f"{label} has every tensor of the model under each of the prefixes "
            f"{', '.join(map(repr, complete))}; choose one "
            "with `lockstep checkpoint import --prefix`"
        )
    # Without a complete match report the prefix that comes closest.
    prefix = min(missing_by, key=lambda prefix: len(missing_by[prefix]))
    source = {}
    for name in model:
        partner = name if f"{prefix}{name}" in names else _partner(name, names, ties, prefix)
        if partner is not None:
            source[name] = names[f"{prefix}{partner}"]
    used = {f"{prefix}{name}" for name in model}
    rest = sorted(names.keys() - used)
    mismatch = _differences(weights, model, source, missing_by[prefix], _within(rest, model, prefix, leave))
    if any(mismatch):
        removed = f", with the prefix {prefix!r} removed," if prefix else ""
        raise CheckpointError(
            f"{label} ({weights.kind}){removed} has {len(source)} of the model's {len(model)} tensors, {mismatch}; its "
            f"names begin with {list_names(sorted(names)[:1])}; {advise_drop(mismatch, len(model))}"
        )
    _check_ties(weights, source, ties)
    forms = weights.tensors
    widened = []
    for name, tensor in model.items():
        if forms[source[name]].dtype != dtype_name(tensor.dtype):
            widened.append(name)
    return NameMatch(source, prefix, rest + weights.others, widened)


def _within(rest: list[str], model: Mapping[str, Tensor], prefix: str, leave: Callable[[str], bool]) -> list[str]:
    """Return the wanted names within the model, without the prefix."""
    parts = {name.partition(".")[0] for name in model}
    inside = []
    for name in rest:
        if name.startswith(prefix):
            inside.append(name.removeprefix(prefix))
    names = []
    for name in inside:
        if (prefix or name.partition(".")[0] in parts) and not leave(name):
            names.append(name)
    return names


def _differences(
    weights: ForeignWeights,
    model: Mapping[str, Tensor],
    source: Mapping[str, str],
    missing: list[str],
    extra: list[str],
) -> Differences:
    """Compare dtypes and shapes.

    A file may have a narrower dtype, if the model's dtype has all of its values.
    """
    forms = dict[str, str]()
    shapes = list[str]()
    for name in sorted(source):
        tensor = model[name]
        form = weights.tensors[source[name]]
        wanted = TensorForm(dtype_name(tensor.dtype), tuple(tensor.shape))
        if form.shape != wanted.shape or wanted.dtype not in (form.dtype, *_WIDER.get(form.dtype, ())):
            forms[name] = f"{form}, not {wanted}"
            shapes += [name] * (form.shape != wanted.shape)
    return Differences(missing, extra, forms, shapes)


def _missing(names: Mapping[str, str], model: Mapping[str, Tensor], ties: Mapping[str, str], prefix: str) -> list[str]:
    missing = []
    for name in model:
        if f"{prefix}{name}" not in names and _partner(name, names, ties, prefix) is None:
            missing.append(name)
    return missing


def _partner(name: str, names: Mapping[str, str], ties: Mapping[str, str], prefix: str) -> str | None:
    """Return another name of the same tied tensor that the file has; None without one."""
    first_name = ties.get(name, name)
    group = [first_name, *(second for second, original in ties.items() if original == first_name)]
    for candidate in group:
        if candidate != name and f"{prefix}{candidate}" in names:
            return candidate
    return None


def _check_ties(weights: ForeignWeights, source: Mapping[str, str], ties: Mapping[str, str]) -> None:
    for second, first_name in ties.items():
        if second not in source or first_name not in source or source[second] == source[first_name]:
            continue
        one = weights.read(source[first_name])
        other = weights.read(source[second])
        if one.dtype != other.dtype or not torch.equal(as_bytes(one), as_bytes(other)):
            raise CheckpointError(
                f"{printable(str(weights.path))}: {printable(first_name, 120)} and {printable(second, 120)} are "
                f"one tensor in "
                "the model and differ in the file; give the model that was saved"
            )


def fill(weights: ForeignWeights, match: NameMatch, tensors: Mapping[str, Tensor]) -> None:
    """Fill tensors in place, each with its part of the file's tensor.

    Args:
        tensors: by the model's names; plain ones, or DTensors of any mesh.
    """
    with torch.no_grad():
        for name in match.source:
            for block, local in parts_of(tensors[name], name):
                cut = tuple(slice(begin, begin + size) for begin, size in zip(block.offsets, block.shape, strict=True))
                local.copy_(weights.read_part(match.source[name], cut))


def select_names(weights: ForeignWeights, prefix: str | None, drop: list[str]) -> NameMatch:
    """Choose which tensors to import, and their names, without a model.

    Args:
        prefix: take the names that begin with it, and remove it; None: remove "module." if all have it, as DDP does.
        drop: patterns of names to leave out, such as "*.attn.bias", after the prefix is removed.

    Raises:
        CheckpointError: no name has the prefix, or a pattern matches none.
    """
    names = _plain_names(weights)
    label = printable(str(weights.path))
    if prefix is None:
        if all(name.startswith("module.") for name in names):
            prefix = "module."
        else:
            prefix = ""
    source = {}
    for name, file in names.items():
        if name.startswith(prefix):
            source[name.removeprefix(prefix)] = file
    if not source:
        raise CheckpointError(f"--prefix {prefix}: no name in {label} begins with it; they begin with {min(names)}")
    for pattern in drop:
        dropped = []
        for name in source:
            if fnmatch.fnmatchcase(name, pattern):
                dropped.append(name)
        if not dropped:
            raise CheckpointError(f"--drop {pattern}: no name in {label} matches it; they begin with {min(source)}")
        for name in dropped:
            del source[name]
    unused = sorted(set(weights.tensors) - set(source.values())) + weights.others
    return NameMatch(source, prefix, unused, [])
