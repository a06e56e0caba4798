"""The verb `eval`: scores of a model on the tasks of lm-eval."""

import contextlib
import datetime
import io
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from palimpsa_surgery import ranks
from palimpsa_surgery._version import __version__
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation.harness import (
    Suite,
    check_lengths,
    check_metrics,
    find_suite,
    load_tasks,
    require_lm_eval,
)
from palimpsa_surgery.stages.evaluation.presets import LONGBENCH2_GROUPS, PRESETS, RULER_MARGIN
from palimpsa_surgery.stages.evaluation.summary import scores_of, task_result
from palimpsa_surgery.stages.launch import check_honoured, check_request
from palimpsa_surgery.surgery.checkpoints import load_tokenizer, load_with_fingerprint, open_source
from palimpsa_surgery.surgery.devices import device_name, out_of_memory, resolve_device
from palimpsa_surgery.surgery.dtypes import check_dtype, choose_dtype, dtype_name
from palimpsa_surgery.surgery.export import NATIVE_LENGTH, stated_length
from palimpsa_surgery.surgery.outputs import check_output_directory, fresh_directory
from palimpsa_surgery.surgery.results import Evaluation
from palimpsa_surgery.surgery.weights import one_line

if TYPE_CHECKING:
    from accelerate import Accelerator
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task

    from palimpsa_surgery.stages.evaluation.language_model import CountingLM

_BOOTSTRAP = 1000  # resamples for the standard error of perplexities; lm-eval's own 100,000 take minutes


def evaluate(
    model: str | os.PathLike,
    preset: str | os.PathLike,
    output: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | None = None,
    tasks: Sequence[str] | None = None,
    limit: int | None = None,
    lengths: Sequence[int] | None = None,
    max_length: int | None = None,
    allow_longer: bool = False,
    batch_size: int | str = "auto",
    device: str | None = None,
    dtype: str | None = None,
    overwrite: bool = False,
) -> Evaluation | None:
    """Score a model on tasks of lm-eval and write a folder with `results.json` and `results.md`.

    Several processes (`accelerate launch`, `torchrun`) share out the documents, one GPU each.

    Args:
        model: folder or Hub id of a Mamba2 checkpoint, native or Hugging Face, or of a hybrid.
        preset: "commonsense" (paper Table 2), "ruler" (Table 6), "longbench2" (Table 3), or a YAML file or folder of
            tasks in lm-eval's format, whose own Python functions are run.
        output: folder to write.
        tokenizer: folder, tokenizer.json or Hub id, where the checkpoint does not bring its own.
        tasks: only these of the preset's tasks.
        limit: documents of each task, in RULER of each length, at most.
        lengths: of RULER's documents, in tokens; default: 4,096, 8,192, 16,384, 32,768.
        max_length: tokens beyond which a request is cut from the left; by default what the model states (2,048 where
            it states nothing), or what the tasks' data are made to need.
        allow_longer: let lengths exceed what the model states.
        batch_size: requests computed at once, or "auto": as many as fit on a GPU, 1 elsewhere.
        device: such as "cpu" or "cuda:1"; default: a GPU if there is one.
        dtype: "float32", "bfloat16" or "float16"; default: the checkpoint's own type on a GPU, float32 elsewhere.
        overwrite: replace `output` if it is not empty.

    Returns:
        What was written; None in all processes but the first.

    Raises:
        UserError: any mistake in the above, a missing package, data that cannot be had, a length beyond the
            model's, or a prediction that is not finite.
    """
    preset = os.fspath(preset)
    check_output_directory(
        output, overwrite=overwrite, inputs=[model, tokenizer, None if preset in PRESETS else preset]
    )
    _check_numbers(limit, max_length, batch_size, dtype)
    with _quiet(), tempfile.TemporaryDirectory() as scratch:
        require_lm_eval(PRESETS[preset].needs if preset in PRESETS else ())
        suite = find_suite(preset, tasks)
        if lengths is not None:
            check_lengths(suite, lengths)
        lengths = tuple(lengths or (suite.preset.lengths if suite.preset else ()))
        accelerator = _accelerator(device)
        where = accelerator.device if accelerator else resolve_device(device)
        source = open_source(model)
        words = load_tokenizer(source, tokenizer)
        if words.eos_token_id is None:  # before which lm-eval puts texts, and after which answers end
            raise UserError(f"the tokenizer of {source.name} has no eos token, which lm-eval needs")
        stated = stated_length(source) or NATIVE_LENGTH
        asked = {"--max-length": max_length or 0, "--lengths": max(lengths, default=0)}
        _check_length(source.name, stated, asked, allow_longer)

        loaded = _load(suite, words, lengths, scratch, accelerator)
        made_for = {f"task {task.task_name}": _needed(task) for task in _leaves(loaded)}
        _check_length(source.name, stated, made_for, allow_longer)
        if max_length is None:
            ruler = max(lengths) + RULER_MARGIN if lengths else 0
            max_length = max(stated, ruler, *made_for.values())
        kind = choose_dtype(dtype, source.dtype, where)
        network, stored = load_with_fingerprint(source, device=where, dtype=kind)
        start = time.perf_counter()
        lm = _language_model(network, words, max_length, batch_size, accelerator)
        found = _run(lm, source.name, suite, loaded, limit, lengths)
        counted = lm.all_lengths()
    if found is None or counted is None:
        return None
    notes = _notes(suite, loaded, found["results"], lm.world_size)
    done = Evaluation(
        model=source.name,
        model_fingerprint=stored,
        parameters=network.num_parameters(),
        palimpsa_layers=tuple(network.config.palimpsa_layers),
        preset=suite.name,
        lm_eval=version("lm_eval"),
        palimpsa_surgery=__version__,
        date=datetime.date.today().isoformat(),
        device=device_name(where),
        dtype=dtype_name(kind),
        batch_size=str(batch_size),
        processes=lm.world_size,
        seconds=round(time.perf_counter() - start, 1),
        limit=limit,
        lengths=lengths or None,
        max_length=max_length,
        stated_length=stated,
        scores=tuple(scores_of(suite, found, lengths, notes)),
        tasks={name: task_result(name, found, counted) for name in found["results"]},
        notes=tuple(notes),
    )
    with fresh_directory(output, overwrite=overwrite) as directory:
        done.save(directory)
    return done


def parse_lengths(text: str) -> list[int]:
    """Read `4096,8192`.

    Raises:
        UserError: it is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"lengths must be numbers of tokens such as 4096,8192, got {one_line(repr(text))}") from None


def parse_batch_size(text: str) -> int | str:
    """Read `8` or `auto`.

    Raises:
        UserError: it is something else.
    """
    try:
        return text if text == "auto" else int(text)
    except ValueError:  # also of a number of more digits than Python reads
        raise UserError(_batch_size_wanted(text)) from None


def _batch_size_wanted(got: object) -> str:
    return f"batch size must be a number, at least 1, or auto, got {one_line(repr(got))}"


def _check_numbers(limit: int | None, max_length: int | None, batch_size: int | str, dtype: str | None) -> None:
    for name, value in (("limit", limit), ("max length", max_length)):
        if value is not None and value < 1:
            raise UserError(f"{name} must be at least 1, got {value}")
    if batch_size != "auto" and not (isinstance(batch_size, int) and batch_size >= 1):
        raise UserError(_batch_size_wanted(batch_size))
    check_dtype(dtype)


def _check_length(model: str, stated: int, asked: Mapping[str, int], allowed: bool) -> None:
    """Raise UserError if a length exceeds what the model states and that is not allowed."""
    for what, length in asked.items():
        if length > stated and not allowed:
            raise UserError(
                f"{what}: {length:,} tokens are more than the {stated:,} that {model} states or was trained on "
                "(--allow-longer lets it read on)"
            )


def _accelerator(device: str | None) -> "Accelerator | None":
    """The process group, if this process is one of several.

    Raises:
        UserError: the launch cannot be what was asked for, or a device is given.
    """
    check_request()
    if ranks.world_size() == 1:
        return None
    from accelerate import Accelerator, InitProcessGroupKwargs

    if device not in (None, "cpu"):
        raise UserError(f"several processes take a device each: leave out --device {device}")
    patience = InitProcessGroupKwargs(timeout=datetime.timedelta(weeks=1))  # some documents take longer than others
    accelerator = Accelerator(cpu=device == "cpu" or not torch.cuda.is_available(), kwargs_handlers=[patience])
    check_honoured(accelerator)
    return accelerator


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's prints off standard output, and its bars off a standard error that nobody watches."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        if not sys.stderr.isatty():
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        yield


def _load(
    suite: Suite,
    tokenizer: PreTrainedTokenizerBase,
    lengths: Sequence[int],
    scratch: str,
    accelerator: "Accelerator | None",
) -> "list[Task | Group]":
    """Load the tasks, with lm-eval's seeds, since some draw their data now."""
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    from palimpsa_surgery.stages.evaluation.language_model import silence_lm_eval

    silence_lm_eval()
    metadata = {}
    if lengths:  # RULER opens the tokenizer by name, running its code if it has any: a copy has none
        tokenizer.save_pretrained(scratch)
        metadata = {"tokenizer": scratch, "max_seq_lengths": list(lengths)}
    random.seed(DEFAULT_RANDOM_SEED)
    np.random.seed(DEFAULT_OTHER_SEED)
    torch.manual_seed(DEFAULT_OTHER_SEED)
    with accelerator.local_main_process_first() if accelerator else contextlib.nullcontext():
        loaded = load_tasks(suite, metadata)
    for task in _leaves(loaded):
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=DEFAULT_OTHER_SEED)
        check_metrics(task)
    return loaded


def _leaves(loaded: "Sequence[Task | Group]") -> "list[Task]":
    """All tasks, those of groups included."""
    from lm_eval.api.group import Group

    return [task for item in loaded for task in (item.get_all_tasks() if isinstance(item, Group) else [item])]


def _needed(task: "Task") -> int:
    """Tokens that a task says its requests need, as `write_lm_eval_tasks` does; 0 if it does not say."""
    metadata = task.config.metadata
    needed = metadata.get("max_length", 0) if isinstance(metadata, Mapping) else 0
    return needed if isinstance(needed, int) else 0


def _notes(suite: Suite, loaded: "Sequence[Task | Group]", results: Mapping[str, Any], processes: int) -> list[str]:
    """What the summary lacks, and what it depends on."""
    from lm_eval.api.samplers import ContextSampler

    notes = []
    # lm-eval draws them document by document, and each process has its own documents.
    drawn = [t.task_name for t in _leaves(loaded) if t.get_config("num_fewshot") and type(t.sampler) is ContextSampler]
    if processes > 1 and drawn:
        notes.append(f"other examples stand in the prompts of {', '.join(drawn)} on another number of processes")
    for task in _leaves(loaded) if suite.preset is None else ():
        given = [key.partition(",")[0] for key in results[task.task_name]]
        if task.OUTPUT_TYPE != "generate_until" and (
            lacking := [name for name in task.aggregation() if name not in given]
        ):
            notes.append(f"lm-eval gives no {' and no '.join(lacking)} of {task.task_name}, a {task.OUTPUT_TYPE} task")
    if suite.preset is not None and len(suite.tasks) < len(suite.preset.tasks):
        of = f"{len(suite.tasks)} of the preset's {len(suite.preset.tasks)} tasks"
        notes.append(f"{of}: scores that need the others are left out")
    if suite.preset is not None and suite.preset.samples:
        for task in _leaves(loaded):
            lacking = [key for key in LONGBENCH2_GROUPS if key not in task.eval_docs.column_names]
            if lacking:
                columns = ", ".join(task.eval_docs.column_names)
                notes.append(f"{task.task_name} is not in the scores by {' or '.join(lacking)} (it has: {columns})")
    return notes


def _language_model(
    network: torch.nn.Module,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    batch_size: int | str,
    accelerator: "Accelerator | None",
) -> "CountingLM":
    from palimpsa_surgery.stages.evaluation.language_model import CountingLM

    if batch_size == "auto" and network.device.type != "cuda":
        batch_size = 1  # nothing overflows that lm-eval could look for
    return CountingLM(network, tokenizer, max_length=max_length, batch_size=batch_size, accelerator=accelerator)


def _run(
    lm: "CountingLM",
    name: str,
    suite: Suite,
    loaded: "Sequence[Task | Group]",
    limit: int | None,
    lengths: Sequence[int],
) -> dict[str, Any] | None:
    """Run lm-eval; its results are those of the first process, None elsewhere."""
    from lm_eval import evaluator
    from lm_eval.tasks import TaskManager

    from palimpsa_surgery.stages.evaluation.language_model import finite_logits

    samples = None
    if lengths and limit is not None:  # lm-eval would take them all from the first length
        samples, limit = {task.task_name: _first_of_each_length(task, limit) for task in _leaves(loaded)}, None
    os.environ.setdefault("DISABLE_MULTIPROC", "1")  # one process is enough for so few resamples
    try:
        with finite_logits(lm.model, name):
            return evaluator.evaluate(
                lm,
                TaskManager(include_defaults=False).load(list(loaded)),
                limit=None if limit is None else min(limit, sys.maxsize),
                samples=samples,
                bootstrap_iters=_BOOTSTRAP,
                log_samples=suite.preset is not None and suite.preset.samples,
            )
    except UserError:
        raise
    except OverflowError:
        raise UserError(f"model {name} finds a text so unlikely that its perplexity is no number") from None
    except Exception as error:
        if out_of_memory(error):
            less = "a number for --batch-size" if lm.batch_size == "auto" else "a smaller --batch-size"
            raise UserError(
                f"{lm.device} has too little memory for --batch-size {lm.batch_size} and up to {lm.max_length:,} "
                f"tokens: give {less if lm.batch_size != 1 else 'a smaller --max-length'}"
            ) from None
        if suite.preset is not None:  # lm-eval's own tasks: a bug of ours
            raise
        raise UserError(f"lm-eval cannot run {suite.name} ({type(error).__name__}: {one_line(error)})") from error


def _first_of_each_length(task: "Task", limit: int) -> list[int]:
    """Numbers of the first `limit` documents of each length of one of RULER's tasks."""
    taken: dict[int, list[int]] = {}
    for number, length in enumerate(task.eval_docs["max_length"]):
        taken.setdefault(length, []).append(number)
    return [number for numbers in taken.values() for number in numbers[:limit]]
