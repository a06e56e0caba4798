"""Tensors stored in a checkpoint folder, read one at a time.

Reads `model.safetensors`, `pytorch_model.bin` and shards of either with their index. Files are memory
mapped: opening a checkpoint reads names, shapes and types only. Checkpoints are data: a pickle that holds
anything but plain tensors is refused, and nothing in it is ever executed.
"""

import json
import pickle
import re
import zipfile
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from palimpsa_surgery.errors import UserError

WEIGHT_FILES = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
"""What a folder may hold, the first that exists being the one that is read."""

SAFETENSORS_FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
FLOATS = frozenset(SAFETENSORS_FLOATS.values())

# What torch.load raises for files damaged in one place or another, besides UnpicklingError.
_BROKEN_PICKLE = (
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,
    TypeError,
    ValueError,
    zipfile.BadZipFile,
)


@dataclass(frozen=True)
class StoredTensor:
    """Where a tensor is and what it looks like; `dtype` is the stored name where it is none of FLOATS."""

    file: Path
    shape: tuple[int, ...]
    dtype: torch.dtype | str


class StoredWeights:
    """The tensors of a checkpoint folder.

    Attributes:
        tensors: name to StoredTensor, in stored order.
        file: the weights or index file that was chosen.
        unread: names of other weights files in the folder.
    """

    def __init__(self, folder: Path) -> None:
        """Open the weights of `folder`.

        Raises:
            UserError: there are none, or a file is damaged, missing, or holds anything but plain tensors.
        """
        present = [name for name in WEIGHT_FILES if (folder / name).is_file()]
        if not present:
            raise UserError(f"{folder} holds no weights: one of {', '.join(WEIGHT_FILES)} is needed")
        self.file = folder / present[0]
        self.unread = tuple(present[1:])
        self.tensors: dict[str, StoredTensor] = {}
        self._pickles: dict[Path, dict[str, torch.Tensor]] = {}
        if self.file.suffix == ".json":
            self._open_shards()
        else:
            self.tensors = self._open(self.file)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor called `name`, on the CPU, as stored; it may share memory with the file."""
        file = self.tensors[name].file
        if file in self._pickles:
            return self._pickles[file][name]
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} can no longer be read: {one_line(error)}") from error

    def _open_shards(self) -> None:
        """Open every shard that the index names, and hold it to what the index says."""
        weight_map = read_json(self.file).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise UserError(f"{self.file} has no weight_map")
        for shard in weight_map.values():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise UserError(f"{self.file} names {shard!r}, which is not a file beside it")
            if not (self.file.parent / shard).is_file():
                raise UserError(f"{self.file} names {shard}, which is missing")
        for shard in dict.fromkeys(weight_map.values()):
            held = self._open(self.file.parent / shard)
            named = {key for key, file in weight_map.items() if file == shard}
            if absent := [key for key in weight_map if key in named and key not in held]:
                raise UserError(f"{self.file} places {listed(absent)} in {shard}, which does not hold it")
            if extra := [key for key in held if key not in named]:
                raise UserError(f"{shard} holds {listed(extra)}, which {self.file} does not place there")
            self.tensors |= held

    def _open(self, file: Path) -> dict[str, StoredTensor]:
        """Names, shapes and types of the tensors in one file."""
        try:
            with file.open("rb") as stream:
                start = stream.read(64)
        except OSError as error:
            raise UserError(f"{file} cannot be read: {error.strerror}") from error
        if start.startswith(b"version https://git-lfs"):
            raise UserError(f"{file} is a Git LFS pointer, not the weights: run `git lfs pull` in its folder")
        return self._open_safetensors(file) if file.suffix == ".safetensors" else self._open_pickle(file)

    def _open_safetensors(self, file: Path) -> dict[str, StoredTensor]:
        try:
            with safe_open(file, framework="pt") as tensors:
                slices = {name: tensors.get_slice(name) for name in tensors.keys()}  # noqa: SIM118
                return {
                    name: StoredTensor(
                        file, tuple(part.get_shape()), SAFETENSORS_FLOATS.get(part.get_dtype(), part.get_dtype())
                    )
                    for name, part in slices.items()
                }
        except (SafetensorError, OSError) as error:
            raise UserError(f"{file} is damaged or not a safetensors file: {one_line(error)}") from error

    def _open_pickle(self, file: Path) -> dict[str, StoredTensor]:
        try:
            # Only archives in torch's zip format can be mapped; files from before torch 1.6 are read whole.
            mmap = zipfile.is_zipfile(file)
            state = torch.load(file, map_location="cpu", mmap=mmap, weights_only=True)
        except pickle.UnpicklingError as error:
            if wanted := re.search(r"(?:GLOBAL|global)\s+`?([\w.]+)|(?:class|function)\s+`?([\w.]+)", str(error)):
                what = wanted.group(1) or wanted.group(2)
                raise UserError(f"{file} is refused: it is not plain tensors but asks for {what}") from error
            raise UserError(f"{file} is damaged, or not a file of plain tensors") from error
        except _BROKEN_PICKLE as error:
            raise UserError(f"{file} is damaged, cut short or not a PyTorch weights file") from error
        if not isinstance(state, dict):
            raise UserError(f"{file} holds no dictionary of tensors but a value of type {type(state).__name__}")
        for name, value in state.items():
            if not isinstance(name, str) or not isinstance(value, torch.Tensor):
                raise UserError(f"{file} holds {name!r}, which is not a tensor but of type {type(value).__name__}")
            if value.layout is not torch.strided or value.is_quantized or value.is_meta:
                raise UserError(f"{file} holds {name} as a {value.layout} tensor, not as plain values")
        self._pickles[file] = state
        return {
            name: StoredTensor(file, tuple(value.shape), value.dtype if value.dtype in FLOATS else str(value.dtype))
            for name, value in state.items()
        }


def read_json(file: Path) -> dict:
    """Read a JSON object; transformers' `{"__float__": "Infinity"}` becomes the float.

    Raises:
        UserError: the file cannot be read, or is not a JSON object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"), object_hook=_special_float)
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise UserError(f"{file} is not valid JSON: {one_line(error)}") from error
    if not isinstance(content, dict):
        raise UserError(f"{file} holds a JSON {type(content).__name__}, not an object")
    return content


def _special_float(value: dict) -> object:
    if value.keys() != {"__float__"}:
        return value
    number = value["__float__"]
    if not isinstance(number, str | float):
        raise ValueError(f"__float__ is {number!r}, no number")
    return float(number)


def one_line(error: BaseException | str, limit: int = 200) -> str:
    """A text, or an error's message, on one line, cut to `limit` characters."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def listed(names: list[str], limit: int = 4) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
