"""Checkpoints in and out.

`open_source` finds out what a checkpoint is and checks every key of it, `load_model` makes a model of it,
`load_tokenizer` finds its tokenizer, and `save_checkpoint` writes a folder that transformers loads. Four
formats come in (`mamba_ssm`'s native one, transformers' Mamba2, our hybrids, the authors' meta_mamba2) and
one goes out. Nothing is left to a default, and nothing is initialised in silence.
"""

import copy
import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from transformers import GenerationConfig, Mamba2Config, Mamba2ForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.surgery.configs import SourceKind, read_config
from palimpsa_surgery.surgery.devices import enough_memory
from palimpsa_surgery.surgery.hub import checkpoint_folder
from palimpsa_surgery.surgery.keys import EMBEDDINGS, LM_HEAD, KeyRule, key_table, parameter_count
from palimpsa_surgery.surgery.progress import track
from palimpsa_surgery.surgery.tokenizer import find_tokenizer, has_tokenizer, no_tokenizer, read_tokenizer, token_ids
from palimpsa_surgery.surgery.weights import FLOATS, WEIGHT_FILES, StoredWeights, listed, one_line

__all__ = [
    "KeyRule",
    "Source",
    "fingerprint",
    "key_table",
    "load_model",
    "load_tokenizer",
    "load_with_fingerprint",
    "open_source",
    "parameter_count",
    "save_checkpoint",
]


@dataclass(frozen=True)
class Source:
    """A checkpoint whose config, keys and shapes have been checked.

    Attributes:
        path: its folder.
        name: the folder or Hub id as it was given.
        kind: its format.
        config: its config in our form, token ids included.
        dtype: type of the stored weights; where they are mixed, the narrowest that holds all of them exactly.
        notes: settings that were accepted although nothing here reads them, and other things worth knowing.
    """

    path: Path
    name: str
    kind: SourceKind
    config: PalimpsaMamba2Config
    dtype: torch.dtype
    notes: tuple[str, ...] = ()


def open_source(model: str | Path) -> Source:
    """Check a checkpoint without loading its weights.

    Args:
        model: a folder, or a Hub id, which is downloaded.

    Raises:
        UserError: there is no such checkpoint, its config is not supported, its files are damaged, or a key
            is missing, unexpected or of the wrong shape.
    """
    folder, name = checkpoint_folder(model), str(model)
    kind, config, notes = read_config(folder, name)
    weights = StoredWeights(folder)
    if weights.unread:
        notes.append(f"{', '.join(weights.unread)}: not read, since {weights.file.name} is there")
    matched = _match_keys(weights, kind, config, name)
    if dropped := [rule.key for rule in matched if rule.use == "dropped"]:
        notes.append(f"dropped {len(dropped)} tensors: {listed(dropped)}")
    types = {weights.tensors[stored].dtype for rule, stored in matched.items() if rule.use != "dropped"}
    dtype = next(iter(types))
    for other in types:
        dtype = torch.promote_types(dtype, other)
    if len(types) > 1:
        notes.append(f"weights of several types ({listed(sorted(map(str, types)))}) are taken as {dtype}")

    config.dtype = dtype
    return _with_tokenizer(Source(folder, name, kind, config, dtype, tuple(notes)))


def open_config(model: str | Path) -> Source:
    """Check a checkpoint as `open_source` does, or its config alone where its weights are not there.

    Of a Hub repository only the small files are downloaded.

    Raises:
        UserError: as `open_source`, but for missing weights.
    """
    folder = checkpoint_folder(model, weights=False)
    local = Path(model).expanduser().is_dir()
    if local and any((folder / name).is_file() for name in WEIGHT_FILES):
        return open_source(model)
    kind, config, notes = read_config(folder, str(model))
    if local:
        notes.append("The weights are not here: neither read nor checked.")
    else:
        notes.append(
            f"The weights of {model} are not checked yet; what of them is not in the cache will be downloaded: about "
            f"{parameter_count(config) * 2 / 2**30:.1f} GiB in 16 bits, twice that in 32."
        )
    return _with_tokenizer(Source(folder, str(model), kind, config, torch.float32, tuple(notes)))


def _with_tokenizer(source: Source) -> Source:
    """Take token ids from the checkpoint's tokenizer, and note what is wrong with its small files."""
    folder, config, notes = source.path, source.config, list(source.notes)
    tokenizer = None
    if has_tokenizer(folder):
        try:
            tokenizer = read_tokenizer(folder, rows=config.vocab_size)
        except UserError as error:  # another one may be given; without one, `load_tokenizer` raises this
            notes.append(f"token ids are not taken from its tokenizer: {error}")
    for key, value in token_ids(tokenizer, config.to_dict()).items():
        setattr(config, key, value)
    _, problem = _generation_config(folder)
    return dataclasses.replace(source, notes=(*notes, *problem))


def load_model(
    source: Source | str | Path, *, device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32
) -> PalimpsaMamba2ForCausalLM:
    """Load a checkpoint of any format into our model class.

    Every parameter comes from the checkpoint: the model is laid out without memory and each tensor is put
    in place by name, so that at most one tensor exists twice. `config.dtype` keeps the stored type.

    Args:
        source: a checkpoint, opened or not.
        device: where the parameters go.
        dtype: type of all parameters.

    Returns:
        The model, in evaluation mode.

    Raises:
        UserError: as `open_source`; also NaN or infinite weights, a tied head that differs from the
            embeddings, or too little memory on a GPU.
    """
    source = source if isinstance(source, Source) else open_source(source)
    weights = StoredWeights(source.path)
    matched = _match_keys(weights, source.kind, source.config, source.name)
    state: dict[str, Tensor] = {}
    for rule, stored in track(list(matched.items()), "Loading weights"):
        if rule.use == "dropped":
            continue
        value = weights.read(stored)
        if rule.use == "tied":
            _check_tied(value, weights.read(matched[next(r for r in matched if r.key == EMBEDDINGS)]), source.name)
            continue
        with enough_memory(f"{device} has too little memory for the weights of {source.name}"):
            placed = value.to(device=device, dtype=dtype, copy=True)  # a copy, since `value` may lie in the file
        _check_finite(value, placed, stored, source.name)
        state[rule.key] = placed
    model = _assemble(PalimpsaMamba2ForCausalLM, copy.deepcopy(source.config), state)
    generation_config, _ = _generation_config(source.path)
    if generation_config is not None:
        model.generation_config = generation_config
    _set_token_ids(model, token_ids(None, source.config.to_dict()))
    return model.eval()


def load_tokenizer(source: Source | str | Path, tokenizer: str | Path | None = None) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a checkpoint.

    Args:
        source: a checkpoint, opened or not.
        tokenizer: a folder, a `tokenizer.json` file or a Hub id that takes precedence over the checkpoint's
            own files; without either, native checkpoints imply `EleutherAI/gpt-neox-20b`.

    Raises:
        UserError: there is none, it cannot be read or fetched, or it has ids that the embedding lacks.
    """
    source = source if isinstance(source, Source) else open_source(source)
    rows = source.config.vocab_size
    where = tokenizer
    if where is None:
        where = find_tokenizer(source.path, native=source.kind == "native", rows=rows)
    if where is None:
        raise no_tokenizer(source.name)
    return read_tokenizer(where, rows=rows)


def fingerprint(model: PreTrainedModel) -> str:
    """Hash the names, shapes and values of a model's parameters.

    Values count as float32, so that loading float16 weights as float32 does not change the hash; tied
    embeddings count once.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        value = parameter.detach().to(device="cpu", dtype=torch.float32).contiguous()
        digest.update(f"{name} {tuple(value.shape)}\n".encode())
        digest.update(value.numpy())
    return digest.hexdigest()


def load_with_fingerprint(
    source: Source, *, device: torch.device, dtype: torch.dtype
) -> tuple[PalimpsaMamba2ForCausalLM, str]:
    """Load a model in any type, with the fingerprint of its weights as they are stored."""
    model = load_model(source, device=device, dtype=source.dtype)
    stored = fingerprint(model)
    with enough_memory(f"{device} has too little memory for the weights of {source.name} in {dtype}"):
        return model.to(dtype), stored


def save_checkpoint(
    model: PalimpsaMamba2ForCausalLM,
    directory: Path,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    dtype: torch.dtype | None = None,
    extra_files: Mapping[str, str] | None = None,
    max_shard_size: str = "5GB",
    parameters: Mapping[str, Tensor] | None = None,
) -> None:
    """Write a folder that `AutoModelForCausalLM.from_pretrained` loads bit for bit.

    A model without Palimpsa layers becomes a plain Mamba2 of transformers, unless its gated norm is one that
    transformers' Mamba2 does not have; any other needs `import palimpsa_surgery.hf_models` to load.

    Args:
        model: what to save; it is left as it is.
        directory: an existing folder.
        tokenizer: saved along; its token ids go into the configs.
        dtype: type of the written weights; by default the one in `model.config.dtype`, which `load_model`
            sets to the type of the checkpoint it read.
        extra_files: contents of further text files, by name.
        max_shard_size: weights beyond this size are split.
        parameters: values by name instead of the model's own, for one that holds only its part of them.

    Raises:
        UserError: a weight is NaN or infinite, or becomes so in `dtype`.
    """
    dtype = dtype or _as_dtype(model.config.dtype) or model.dtype
    state = {}
    for name, parameter in (parameters or dict(model.named_parameters())).items():
        state[name] = parameter.detach().to(device="cpu", dtype=dtype)
        _check_finite(parameter, state[name], name, "the model to save")
    kind, config = _written_form(model.config)
    written = _assemble(kind, config, state)
    written.generation_config = copy.deepcopy(model.generation_config)
    if tokenizer is not None:
        _set_token_ids(written, token_ids(tokenizer, config.to_dict()))
        tokenizer.save_pretrained(directory)
    written.save_pretrained(directory, max_shard_size=max_shard_size)
    for name, text in (extra_files or {}).items():
        (directory / name).write_text(text, encoding="utf-8")


def _match_keys(
    weights: StoredWeights, kind: SourceKind, config: PalimpsaMamba2Config, name: str
) -> dict[KeyRule, str]:
    """Account for every stored key: each rule of the key table with the stored name of its tensor."""
    table = key_table(config, unused_importance=kind == "meta_mamba2")
    left = dict(weights.tensors)
    matched: dict[KeyRule, str] = {}
    missing, misshaped = [], []
    for rule in table:
        stored = next((key for key in (rule.key, rule.native) if key in left), None)
        if stored is None:
            if rule.use == "copied":
                missing.append(rule.key)
            continue
        shape = left.pop(stored).shape
        if shape != rule.shape:
            misshaped.append(f"{stored} is {list(shape)}, not {list(rule.shape)}")
        matched[rule] = stored
    problems = [
        f"{label}: {listed(keys)}"
        for label, keys in (("missing", missing), ("unexpected", list(left)), ("wrong shape", misshaped))
        if keys
    ]
    if problems:
        tied = [stored for rule, stored in matched.items() if rule.use == "tied"]
        held = sum(torch.Size(t.shape).numel() for key, t in weights.tensors.items() if key not in tied)
        raise UserError(
            f"the weights of {name} do not fit its config; {'; '.join(problems)} "
            f"(the config implies {parameter_count(config):,} parameters, {weights.file.name} holds {held:,})"
        )
    for stored in matched.values():
        if (dtype := weights.tensors[stored].dtype) not in FLOATS:
            raise UserError(f"the weights of {name} hold {stored} as {dtype}, not as floating point numbers")
    return matched


def _check_tied(head: Tensor, embeddings: Tensor, name: str) -> None:
    """Raise UserError unless both hold the same bits."""
    same = head.dtype == embeddings.dtype and torch.equal(
        head.contiguous().view(torch.uint8), embeddings.contiguous().view(torch.uint8)
    )
    if not same:
        raise UserError(f"the config of {name} ties the embeddings, but {LM_HEAD} differs from {EMBEDDINGS}")


def _check_finite(value: Tensor, converted: Tensor, key: str, name: str) -> None:
    """Raise UserError if the tensor holds NaN or infinity, or does so only once converted."""
    if bad := int((~torch.isfinite(converted)).sum()):
        if torch.isfinite(value).all():
            raise UserError(f"{key} of {name} does not fit {converted.dtype}: {bad} of its values overflow")
        raise UserError(f"{key} of {name} holds NaN or infinity in {bad} of its {value.numel()} values")


def _assemble(
    kind: type[PreTrainedModel], config: Mamba2Config, state: dict[str, Tensor]
) -> PalimpsaMamba2ForCausalLM | Mamba2ForCausalLM:
    """Lay out a model without memory and put exactly these tensors in place; tie the head if the config does."""
    dtype = config.dtype
    with torch.device("meta"):
        model = kind(config)
    if config.tie_word_embeddings:
        state = state | {LM_HEAD: state[EMBEDDINGS]}
    model.load_state_dict(state, strict=True, assign=True)
    model.tie_weights()
    model.config.dtype = dtype
    if config.tie_word_embeddings != (model.lm_head.weight is model.get_input_embeddings().weight):
        raise RuntimeError("tie_word_embeddings and the model's parameters disagree")
    if unplaced := [name for name, tensor in model.state_dict().items() if tensor.is_meta]:
        raise RuntimeError(f"no values for {listed(unplaced)}")
    return model


def _written_form(config: PalimpsaMamba2Config) -> tuple[type[PreTrainedModel], Mamba2Config]:
    """Class and config to save under: transformers' own Mamba2 wherever it computes the same."""
    if config.palimpsa_layers or config.norm_group_size != config.intermediate_size // config.n_groups:
        return PalimpsaMamba2ForCausalLM, copy.deepcopy(config)
    ours = {"model_type", "auto_map", "architectures", "palimpsa_layers", "importance_rank", "norm_group_size"}
    return Mamba2ForCausalLM, Mamba2Config(**{k: v for k, v in config.to_dict().items() if k not in ours})


def _generation_config(folder: Path) -> tuple[GenerationConfig | None, list[str]]:
    """The folder's generation settings, or None and, if they are there but of no use, a note that says why."""
    if not (folder / "generation_config.json").is_file():
        return None, []
    try:
        settings = GenerationConfig.from_pretrained(folder)
        settings.validate(strict=True)  # as saving will
    except (OSError, ValueError, TypeError) as error:
        return None, [f"generation_config.json is not carried over: {one_line(error)}"]
    return settings, []


def _set_token_ids(model: PreTrainedModel, ids: Mapping[str, int | list[int] | None]) -> None:
    """Set the ids in both configs; generation may stop at more tokens than the one that ends a text."""
    for name, value in ids.items():
        setattr(model.config, name, value)
        generation = getattr(model.generation_config, name)
        if not (isinstance(generation, list) and value in generation):
            setattr(model.generation_config, name, value)


def _as_dtype(dtype: str | torch.dtype | None) -> torch.dtype | None:
    return getattr(torch, dtype) if isinstance(dtype, str) else dtype
