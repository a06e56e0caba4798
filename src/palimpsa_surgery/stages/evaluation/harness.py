"""lm-eval found, its tasks found and loaded: each way that can fail is one clear line."""

import difflib
import importlib
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.evaluation.presets import PRESETS, SHORTEST, Preset
from palimpsa_surgery.surgery.hub import hub_problem
from palimpsa_surgery.surgery.weights import one_line

if TYPE_CHECKING:
    from lm_eval.api.group import Group
    from lm_eval.api.task import Task
    from lm_eval.tasks import TaskManager

INSTALL = "pip install 'palimpsa-surgery[eval]'"


@dataclass(frozen=True)
class Suite:
    """What to run.

    Attributes:
        name: the preset's, or that of the file or folder.
        preset: None for a file or folder.
        tasks: names of tasks and groups, in order.
        folders: where their YAML files are.
        file: that of a single task, which is read without its folder.
    """

    name: str
    preset: Preset | None
    tasks: tuple[str, ...]
    folders: tuple[Path, ...]
    file: Path | None = None


def require_lm_eval(packages: Sequence[str] = ()) -> None:
    """Import lm-eval and what a preset needs besides it.

    Raises:
        UserError: one of them is not installed, or cannot be imported.
    """
    for package in ("lm_eval", "lm_eval.models.huggingface", "lm_eval.tasks", "lm_eval.evaluator", *packages):
        try:
            importlib.import_module(package)
        except (Exception, SystemExit) as error:  # half an installation fails in any way it likes
            absent = isinstance(error, ModuleNotFoundError) and error.name == package.partition(".")[0]
            what = "is not installed" if absent else f"cannot be imported ({type(error).__name__}: {one_line(error)})"
            raise UserError(f"eval needs {package.partition('.')[0]}, which {what}: {INSTALL}") from None


def find_suite(preset: str, only: Sequence[str] | None = None) -> Suite:
    """Find the tasks of a preset, or of a task file or folder in lm-eval's YAML format.

    Args:
        preset: its name, or the path.
        only: run only these of its tasks.

    Raises:
        UserError: there is no such preset, file or task, or the file is none of lm-eval's.
    """
    if preset in PRESETS:
        found = PRESETS[preset]
        names = list(found.tasks)
        chosen = _choose(names, only, f"preset {preset}")
        import lm_eval.tasks

        root = Path(lm_eval.tasks.__file__).parent
        return Suite(preset, found, chosen, tuple(root / folder for folder in dict.fromkeys(found.tasks.values())))
    path = Path(preset).expanduser()
    if preset and path.is_dir():
        manager = _task_manager([path], {})
        _check_files(path, manager)
        names = _top_level(manager)
        if not names:
            raise UserError(f"folder {preset} holds no task of lm-eval (a .yaml file that names its `task`)")
        return Suite(path.resolve().name, None, _choose(names, only, f"folder {preset}"), (path,))
    if path.is_file():
        name, group = _task_name(path)
        chosen = _choose([name], only, f"file {preset}")
        return Suite(path.stem, None, chosen, (path.parent,) if group else (), None if group else path)
    raise UserError(f"{preset!r} is no preset and no task file or folder ({_hint(preset, PRESETS, 'presets')})")


def _hint(name: str, known: Collection[str], what: str) -> str:
    """What may have been meant instead of an unknown name."""
    close = difflib.get_close_matches(name, known, n=1)
    return f"did you mean {close[0]}?" if close else f"{what}: {', '.join(known)}"


def _choose(names: Sequence[str], only: Sequence[str] | None, where: str) -> tuple[str, ...]:
    if only is None:
        return tuple(names)
    for name in only:
        if name not in names:
            raise UserError(f"{where} has no task {name!r} ({_hint(name, names, 'tasks')})")
    if not only:
        raise UserError(f"no tasks of {where} are named (tasks: {', '.join(names)})")
    return tuple(name for name in names if name in only)


def _task_manager(folders: Sequence[Path], metadata: Mapping[str, Any]) -> "TaskManager":
    """lm-eval's index of the tasks in these folders."""
    from lm_eval.tasks import TaskManager

    paths = [str(folder) for folder in folders]
    try:
        return TaskManager(include_path=paths, include_defaults=False, metadata=dict(metadata) or None)
    except Exception as error:  # odd values in any of the files
        raise UserError(f"the tasks in {', '.join(paths)} cannot be read ({_named(error)})") from None


def _check_files(folder: Path, manager: "TaskManager") -> None:
    """See that each YAML file of a folder is read: lm-eval passes over broken ones, and second ones of a name.

    Raises:
        UserError: one is not.
    """
    read = {entry.yaml_path.resolve() for entry in manager.task_index.values() if entry.yaml_path}
    for file in sorted(folder.rglob("*.yaml")):
        if file.resolve() in read or {"__pycache__", ".ipynb_checkpoints"} & set(file.parts):
            continue
        content = _read_yaml(file)
        name = content.get("group", content.get("task"))
        if isinstance(name, str) and name in manager.task_index:
            raise UserError(f"task file {file} names {name!r}, as {manager.task_index[name].yaml_path} does")


def _top_level(manager: "TaskManager") -> list[str]:
    """Groups that no other group holds, and tasks that no group holds."""
    held: set[str] = set()
    for group in manager.all_groups:
        for name in _children(manager, group):
            held |= manager.task_index[name].tags if name in manager.all_tags else {name}
    return [name for name in [*manager.all_groups, *manager.all_subtasks] if name not in held]


def _children(manager: "TaskManager", group: str) -> list[str]:
    """Names of the tasks, tags and groups that a group names itself.

    Raises:
        UserError: one is no name.
    """
    children = manager.task_index[group].cfg.get("task") or []
    names = []
    for child in [children] if isinstance(children, str) else children:
        names.append(child.get("task", child.get("group")) if isinstance(child, Mapping) else child)
        if not isinstance(names[-1], str):
            raise UserError(f"group {group} names a task by {names[-1]!r}, which is no name")
    return names


def _task_name(file: Path) -> tuple[str, bool]:
    """Name of the task or group in a YAML file of lm-eval's, and whether it is a group."""
    content = _read_yaml(file)
    group = "group" in content
    name = content.get("group" if group else "task")
    if not isinstance(name, str):
        raise UserError(f"task file {file} names no `task` or `group` of lm-eval")
    return name, group


def _read_yaml(file: Path) -> dict[str, Any]:
    """Content of a YAML file of lm-eval's, with what it includes, and its functions as strings."""
    from lm_eval.tasks._yaml_loader import load_yaml

    try:
        return load_yaml(file, resolve_func=False)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise UserError(f"task file {file} cannot be read: {one_line(error)}") from None


def check_lengths(suite: Suite, lengths: Sequence[int]) -> None:
    """See that the suite has lengths to choose, and that its generators end at these.

    Raises:
        UserError: neither is so.
    """
    if not (suite.preset and suite.preset.lengths):
        having = ", ".join(name for name, preset in PRESETS.items() if preset.lengths)
        raise UserError(f"{suite.name} has no lengths to choose (--lengths is for {having})")
    if not lengths or min(lengths) < 1:
        raise UserError(f"lengths must be numbers of tokens, at least 1, got {', '.join(map(str, lengths)) or 'none'}")
    if len(set(lengths)) < len(lengths):
        raise UserError(f"lengths are given twice: {', '.join(map(str, lengths))}")
    for task in suite.tasks:
        if min(lengths) < SHORTEST.get(task, 0):
            raise UserError(f"{task} cannot be made with {min(lengths)} tokens: at least {SHORTEST[task]}")


def load_tasks(suite: Suite, metadata: Mapping[str, Any]) -> "list[Task | Group]":
    """Load the tasks and their data, which may be downloaded or made now.

    Args:
        metadata: what RULER's tasks make their data from.

    Raises:
        UserError: one cannot be loaded; the message names it and says why.
    """
    manager = _task_manager(suite.folders, metadata)
    for name in suite.tasks if suite.preset is None else ():
        known = {*manager.task_index, *manager.all_tags}
        children = _children(manager, name) if name in manager.all_groups else []
        if gone := [child for child in children if child not in known]:
            raise UserError(f"group {name} names tasks that are not there: {', '.join(gone)}")
    names = _InTurn(suite.tasks)
    try:
        parts = manager.load([str(suite.file)] if suite.file else names)
    except UserError:
        raise
    except Exception as error:  # of data sets, their hosts, generators, and functions of a task's own
        name = names.current
        config = _read_yaml(suite.file) if suite.file else manager.task_index[name].cfg
        raise UserError(f"task {name}: {_load_problem(error, config)}") from None
    return [parts["groups"].get(name) or parts["tasks"][name] for name in suite.tasks]


class _InTurn(list[str]):
    """Names for one call of lm-eval's `load`, and the one that it has come to.

    In several calls it would draw other data: each draws random numbers for names of tasks that have one.
    """

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__(names)
        self.current = names[0]

    def __iter__(self) -> Iterator[str]:
        for self.current in super().__iter__():
            yield self.current


def check_metrics(task: "Task") -> None:
    """See that lm-eval has the metrics of a task, and what it is to aggregate their values by.

    Raises:
        UserError: it has not.
    """
    functions = getattr(task, "_metric_fn_list", {})  # None for what it does not find
    found = {"metric_list": task.config.metric_list, "process_results": task.config.process_results}
    if problem := _metric_problem(found, [name for name, function in functions.items() if function is not None]):
        raise UserError(f"task {task.task_name}: {problem}")


def _metric_problem(config: Mapping[str, Any], found: Sequence[str] = ()) -> str | None:
    """Say which metric or aggregation of a task is neither lm-eval's nor among those found elsewhere."""
    import lm_eval.api.metrics  # noqa: F401 (fills the registries)
    from lm_eval.api.registry import aggregation_registry, metric_registry

    for entry in config.get("metric_list") or ():
        names = {} if config.get("process_results") else {"metric": [*metric_registry.keys(), *found]}
        for key, known in (names | {"aggregation": list(aggregation_registry.keys())}).items():
            name = entry.get(key)
            if isinstance(name, str) and name not in known:
                return f"lm-eval has no {key} {name!r} ({_hint(name, known, f'{key}s')})"
    return None


def _load_problem(error: Exception, config: Mapping[str, Any]) -> str:
    """Say in a few words why a task could not be loaded."""
    import requests

    dataset = str(config.get("dataset_path") or "")
    if isinstance(error, requests.RequestException):
        host = re.search(r"https?://([^/\s'\"]+)|host='([^']+)'", str(error))
        where = (host[1] or host[2]) if host else "its host"
        return f"its data cannot be fetched: {where} cannot be reached (no network?)"
    if isinstance(error, ImportError):
        return f"it needs a package that is missing ({one_line(error)}): {INSTALL}"
    local = dataset in ("json", "csv", "text", "parquet", "arrow")
    if isinstance(error, LookupError) and (named := re.search(r"Resource '?([\w-]+)'? not found", str(error))):
        part = named[1]  # of nltk, which fetches it when RULER's tasks are first loaded
        return f"nltk's {part} is not on this machine and cannot be fetched: python -m nltk.downloader {part}"
    if isinstance(error, FileNotFoundError) and (local or not dataset):
        return f"its data cannot be read: {one_line(error)}"
    if local and type(error).__module__.startswith("datasets"):
        return f"its data cannot be read: {one_line(error.__cause__ or error)}"
    if isinstance(error, StopIteration):
        return "its data are empty"
    if isinstance(error, KeyError) and error.args == (None,) and (problem := _metric_problem(config)):
        return problem  # lm-eval looked for the aggregation of a metric that it does not have
    of_hub = isinstance(error, ConnectionError) or type(error).__module__.startswith(("huggingface_hub", "datasets"))
    if of_hub or isinstance(error, FileNotFoundError):
        if named := re.search(r"'([\w.-]+/[\w.-]+)' on the Hub", str(error)):
            dataset = named[1]
        reason = "it is not in the local cache, and the Hub cannot be reached or is switched off (HF_HUB_OFFLINE)"
        return f"its data set {dataset} cannot be fetched: {reason if 'Offline' in str(error) else hub_problem(error)}"
    return f"it cannot be loaded ({_named(error)})"


def _named(error: BaseException) -> str:
    return f"{type(error).__name__}: {one_line(error)}"
