"""The model card of an export: what a stranger needs to know, written from what the run and surgery recorded."""

import re
from collections.abc import Sequence
from importlib.metadata import requires
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from palimpsa_surgery._version import __version__
from palimpsa_surgery.surgery.results import Evaluation, conditions, markdown_table, score_table

PAPERS = {
    "Palimpsa": "https://arxiv.org/abs/2602.09075",
    "state initialisation": "https://arxiv.org/abs/2507.02782",
}

LICENSES = {re.compile(r"state-spaces/mamba2(attn)?-[\w.]+"): "apache-2.0"}
"""Licences of published base models, by name."""


def model_card(
    name: str,
    config: dict[str, Any],
    *,
    surgery: dict[str, Any],
    run: dict[str, Any] | None,
    evaluations: Sequence[Evaluation],
    untrained: bool,
    parameters: int,
    figure: bool,
) -> str:
    """Write the model card.

    Args:
        name: Hub id or folder name of the model.
        config: its `config.json`.
        surgery: its `surgery.json`, or {} where none was recorded.
        run: its training run's `run.json`, the recipe itself under `recipe`; None where there is none at hand.
        evaluations: what `eval` measured on these weights.
        untrained: whether the weights are known to be those that the surgery gave.
        parameters: number of parameters, tied ones counted once.
        figure: whether `windows.png` lies beside the card.

    Returns:
        Markdown with a YAML header.
    """
    base, hub_base = _base_model(surgery, run)
    layers = config.get("palimpsa_layers") or []
    sections = [
        _header(name, hub_base, layers, evaluations),
        f"# {name}\n",
        _introduction(base, hub_base, config, layers, parameters),
        _usage(name, layers),
        _layers(config, surgery, layers, figure),
        _training(run, untrained),
        _evaluation(run, evaluations),
        _licences(hub_base, run, layers),
    ]
    return "\n".join(section for section in sections if section)


def _base_model(surgery: dict[str, Any], run: dict[str, Any] | None) -> tuple[str | None, str | None]:
    """Name to show for the base model, and its Hub id if it has one."""
    given = surgery.get("base_model") or (run or {}).get("base")
    if given is None:
        return None, None
    if re.fullmatch(r"[\w-][\w.-]*/[\w.-]+", given) and not Path(given).exists():
        return given, given
    return PurePath(given).name, None  # a folder on somebody's machine: where it was is nobody's business


def _license(hub_base: str | None) -> str | None:
    return next((spdx for pattern, spdx in LICENSES.items() if pattern.fullmatch(hub_base or "")), None)


def _header(name: str, hub_base: str | None, layers: list[int], evaluations: Sequence[Evaluation]) -> str:
    data = ModelCardData(
        model_name=name if evaluations else None,  # the Hub shows results under it
        base_model=hub_base,
        license=_license(hub_base),
        library_name="transformers",
        pipeline_tag="text-generation",
        tags=["mamba2", *(["palimpsa", "custom_code"] if layers else []), "state-space-model", "palimpsa-surgery"],
        eval_results=_eval_results(evaluations) or None,
    )
    return f"---\n{data.to_yaml()}\n---\n"


def _eval_results(evaluations: Sequence[Evaluation]) -> list[EvalResult]:
    """The Hub's metadata for the scores of single tasks whose data have a name."""
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=evaluation.tasks[score.task].dataset or score.task,
            dataset_name=score.task,
            metric_type="perplexity" if score.unit == "perplexity" else "score",
            metric_name=f"{score.name} {score.column}".strip(),
            metric_value=score.value,
        )
        for evaluation in evaluations
        for score in evaluation.scores
        if score.task is not None
    ]


def _introduction(
    base: str | None, hub_base: str | None, config: dict[str, Any], layers: list[int], parameters: int
) -> str:
    origin = "a pretrained Mamba2"
    if base:
        origin = f"[{base}](https://huggingface.co/{base})" if hub_base else f"`{base}`"
    depth, length = config["num_hidden_layers"], config["max_position_embeddings"]
    if layers:
        what = (
            f"{origin} with {len(layers)} of its {depth} layers replaced by Palimpsa layers "
            f"([paper]({PAPERS['Palimpsa']})), which give the memory of a Mamba2 layer an importance of its own: "
            "what matters is overwritten more slowly."
        )
    else:
        what = f"{origin}, in transformers' own format: a Mamba2 of {depth} layers, none of them replaced."
    return (
        f"{what[0].upper()}{what[1:]} Made with palimpsa-surgery {__version__}.\n\n"
        f"{parameters:,} parameters ({config['dtype']}), vocabulary of {config['vocab_size']:,}, "
        f"stated length {length:,} tokens.\n"
    )


def _usage(name: str, layers: list[int]) -> str:
    flag = ", trust_remote_code=True" if layers else ""
    lines = [
        "## How to load it\n",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        f'name = "{name}"  # this repository, or the folder it lies in',
        f"tokenizer = AutoTokenizer.from_pretrained(name{flag})",
        f"model = AutoModelForCausalLM.from_pretrained(name{flag})",
        'inputs = tokenizer("In the beginning", return_tensors="pt")',
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))",
        "```\n",
    ]
    needed = [r for r in requires("palimpsa-surgery") or () if re.match(r"(torch|transformers|safetensors)\b", r)]
    lines.append(f"It needs {', '.join(f'`{requirement}`' for requirement in sorted(needed))} and nothing else.")
    if layers:
        lines.append(
            "The flag runs the Python files of this repository. With palimpsa-surgery installed, "
            "`import palimpsa_surgery.hf_models` makes it unnecessary."
        )
    return "\n".join(lines) + "\n"


def _layers(config: dict[str, Any], surgery: dict[str, Any], layers: list[int], figure: bool) -> str:
    if not layers:
        return ""
    windows = {int(k): v for k, v in ((surgery.get("analysis") or {}).get("median_windows") or {}).items()}
    lines = ["## Replaced layers\n"]
    if windows:
        tokens = surgery["analysis"].get("tokens")
        lines += [
            "The window of a layer is 1 / (1 - forget gate), the number of tokens it remembers; its median is over "
            f"all heads{f' and {tokens:,} tokens of text' if tokens else ''}.\n",
            "| layer | median window (tokens) | |",
            "|---|---|---|",
            *(
                f"| {layer} | {_number(windows[layer])} | {'**Palimpsa**' if layer in layers else 'Mamba2'} |"
                for layer in range(config["num_hidden_layers"])
                if layer in windows
            ),
            "",
        ]
    else:
        lines.append(f"Layers {', '.join(map(str, layers))} (counted from 0); no window analysis was recorded.\n")
    if figure:
        lines.append("![Median window of each layer, and by position](windows.png)\n")
    if init := surgery.get("init"):
        settings = ", ".join(f"{k} {_number(v)}" for k, v in init.items() if not isinstance(v, dict | list))
        lines.append(f"Initialisation of the new parameters: {settings}.\n")
    if drift := surgery.get("drift"):
        lines.append(
            f"Drift right after the surgery, before any training: logits changed by {drift['relative']:.2g} "
            f"relative, KL {drift['kl']:.2g} nats, largest importance ratio {drift['max_importance_ratio']:.2g}, "
            f"on {drift['tokens']:,} tokens.\n"
        )
    elif surgery:
        lines.append("The drift right after the surgery was not measured.\n")
    return "\n".join(lines)


def _training(run: dict[str, Any] | None, untrained: bool) -> str:
    if run is None:
        what = "None after the surgery: this is where training starts." if untrained else "Not recorded."
        return f"## Training\n\n{what}\n"
    recipe = run["recipe"]
    lines = [
        "## Training\n",
        f"Recipe `{recipe['name']}`, kept in `recipe.yaml`; seed {run['seed']}. {recipe['description']}\n",
        "| stage | steps | tokens | sequence length | learning rate | of importance | data |",
        "|---|---|---|---|---|---|---|",
    ]
    for stage, did in zip(recipe["stages"], run["stages"], strict=True):
        lines.append(
            f"| {stage['name']} | {did['steps']:,} | {did['tokens']:,} | {stage['sequence_length']:,} "
            f"| {stage['learning_rate']:g} | {stage['importance_learning_rate']:g} | {_data_names(stage['data'])} |"
        )
    return "\n".join(lines) + "\n"


def _data_names(data: dict[str, Any]) -> str:
    sources = data.get("sources", [data])
    return f"{data['kind']}: " + ", ".join(_share(source) + _source_name(source) for source in sources)


def _share(source: dict[str, Any]) -> str:
    return f"{source['share']:.1%} " if "share" in source else ""


def _source_name(source: dict[str, Any]) -> str:
    """Where a source comes from, with what was kept of it."""
    if hub := source.get("hub"):
        name = f"`{hub['dataset']}`"
        name = f"[{name}](https://huggingface.co/datasets/{hub['dataset']})" if "/" in hub["dataset"] else name
    elif "task" in source:
        return f"synthetic `{source['task']}`"
    else:
        name = ", ".join(f"`{PurePath(file).name}`" for file in source["files"])
    kept = ", ".join(f"{column} {value}" for column, value in source.get("filter", {}).items())
    return f"{name} ({kept})" if kept else name


def _evaluation(run: dict[str, Any] | None, evaluations: Sequence[Evaluation]) -> str:
    if run is None and not evaluations:
        return ""
    lines = ["## Evaluation\n"]
    for evaluation in evaluations:
        lines += [conditions(evaluation) + "\n", *markdown_table(score_table(evaluation)), ""]
        lines += [f"Note: {note}\n" for note in evaluation.notes]
    if run is None:
        return "\n".join(lines)
    lines += [
        "Held-out text of each stage's data, which training did not see, before and after the stage.\n",
        "| stage | loss before (nats per token) | after | perplexity before | after |",
        "|---|---|---|---|---|",
    ]
    for stage in run["stages"]:
        before, after = stage["before"], stage["after"]
        lines.append(
            f"| {stage['name']} | {before['loss']:.4f} | {after['loss']:.4f} "
            f"| {before['perplexity']:.2f} | {after['perplexity']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def _licences(hub_base: str | None, run: dict[str, Any] | None, layers: list[int]) -> str:
    known = _license(hub_base)
    origin = f"{hub_base} ({known})" if known else "the base model: its licence applies to them"
    lines = [
        "## Licences\n",
        ("The Python files are part of palimpsa-surgery, Apache-2.0. " if layers else "")
        + f"The weights derive from {origin}.",
    ]
    if run is not None:
        lines.append("The licences of the training data named above are not recorded; they may restrict use too.")
    return "\n".join(lines) + "\n"


def _number(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
