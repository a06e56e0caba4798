"""All verbs in one go, on the checkpoint and text that ship with the package, without a network."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from palimpsa_surgery.stages.data import Sequences, prepare
from palimpsa_surgery.stages.held_out import evaluate
from palimpsa_surgery.stages.pipeline import Run, train
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.surgery.analysis import Analysis, analyze
from palimpsa_surgery.surgery.assets import asset_path
from palimpsa_surgery.surgery.checkpoints import load_model, load_tokenizer
from palimpsa_surgery.surgery.export import Export, export
from palimpsa_surgery.surgery.outputs import check_output_directory
from palimpsa_surgery.surgery.progress import track
from palimpsa_surgery.surgery.replacement import Replacement, replace

if TYPE_CHECKING:
    from rich.table import Table

TOP_K = 4
ANALYSIS_TOKENS = 8192
SEQUENCE_LENGTH = 1024
HELD_OUT_BYTES = 5_000
"""The end of the shipped text, about its last chapter, which the recipe `demo` does not use."""
HELD_OUT_TOKENS = 1024
PROMPT = "Question: Finish this proverb: A soft answer turneth away wrath:\nAnswer:"

# What somebody does who has torch and transformers, and nothing of this package.
STRANGER = """
import json, sys
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, prompt = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32)
inputs = tokenizer(prompt, return_tensors="pt")
torch.manual_seed(0)
sample = model.generate(**inputs, max_new_tokens=40, do_sample=True, temperature=0.7, top_p=0.9)
text = tokenizer.decode(sample[0], skip_special_tokens=True)
logits = model(**inputs).logits[0, -1].tolist()
assert "palimpsa_surgery" not in sys.modules
print(json.dumps({"text": text, "logits": logits, "module": type(model).__module__}))
"""


@dataclass(frozen=True)
class Reloaded:
    """What `AutoModelForCausalLM` made of the export in a process that does not import this package.

    Attributes:
        module: where its code came from: the export's own copy.
        text: a sample that it generated.
        difference: largest difference of its logits from the exported model's.
    """

    module: str
    text: str
    difference: float


@dataclass(frozen=True)
class Perplexities:
    """Held-out perplexities, from the Mamba2 at the start to the trained hybrid. `print` it through Rich.

    Attributes:
        prose: name of each model, in order, and its perplexity on the last chapters of the shipped text.
        answers: the same for the answers to the last stage's held-out questions.
    """

    prose: dict[str, float]
    answers: dict[str, float]

    def __rich__(self) -> "Table":
        """Draw the table in 80 columns."""
        from rich.table import Table

        table = Table("model", title="Perplexity of held-out text", title_style="bold")
        for name in ("prose", "change", "answers", "change"):
            table.add_column(name, justify="right")
        for name in self.prose:
            row = [name]
            for values in (self.prose, self.answers):
                start = next(iter(values.values()))
                row += [f"{values[name]:.2f}", f"{values[name] / start - 1:+.1%}" if name != next(iter(values)) else ""]
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class Demo:
    """Everything the demo did."""

    analysis: Analysis
    replacement: Replacement
    run: Run
    export: Export
    reloaded: Reloaded
    perplexities: Perplexities


def demo(
    output: str | os.PathLike,
    *,
    overwrite: bool = False,
    begin: Callable[[str, str | None], None] | None = None,
    end: Callable[[Any], None] | None = None,
) -> Demo:
    """Analyze, replace, train, export, reload and generate, in minutes on a laptop.

    Args:
        output: folder for the results: `analysis`, `hybrid`, `run` and `exported`.
        overwrite: replace those in a folder that is not empty.
        begin: called before each step with its title and the command that does the same, if there is one.
        end: called after each step with its result, one of the attributes of `Demo`.

    Raises:
        UserError: `output` is not empty, or cannot be written.
    """
    output = check_output_directory(output, overwrite=overwrite)
    model, text = asset_path("tiny-mamba2"), asset_path("kjv.txt")
    folders = [output / name for name in ("analysis", "hybrid", "run", "exported")]
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    windows, hybrid, run, exported = folders

    def step(title: str, work: Callable[[], Any], *command: object) -> Any:
        if begin is not None:
            begin(title, shell_command(*command) if command else None)
        result = work()
        if end is not None:
            end(result)
        return result

    sizes = {"max_tokens": ANALYSIS_TOKENS, "sequence_length": SEQUENCE_LENGTH}
    analysis = step(
        "Measure how long each layer remembers",
        lambda: analyze(model, text, windows, **sizes),
        *("analyze", model, "--data", text, "--max-tokens", ANALYSIS_TOKENS),
        *("--sequence-length", SEQUENCE_LENGTH, "--output", windows),
    )
    replacement = step(
        f"Replace the {TOP_K} layers that remember longest",
        lambda: replace(model, hybrid, analysis=windows, top_k=TOP_K),
        *("replace", model, "--analysis", windows, "--top-k", TOP_K, "--output", hybrid),
    )
    trained = step(
        "Train the hybrid through three stages",
        lambda: train(hybrid, "demo", run),
        *("train", hybrid, "--recipe", "demo", "--output", run),
    )
    written = step(
        "Export the result",
        lambda: export(run, exported),
        *("export", run, "--output", exported),
    )
    reloaded = step("Load the export as a stranger would, and generate", lambda: reload(exported))
    models = {"Mamba2": model, "hybrid, untrained": hybrid}
    models |= {f"after stage {entry['name']}": run / entry["final"] for entry in trained.record["stages"]}
    perplexities = step("Score text that no stage trained on", lambda: measure_perplexities(models))
    return Demo(analysis, replacement, trained, written, reloaded, perplexities)


def shell_command(*words: object) -> str:
    """A command line broken to fit 80 columns; paths below the working directory are relative to it."""
    lines, line = [], "palimpsa-surgery"
    for word in words:
        if isinstance(word, Path) and word.is_absolute() and word.is_relative_to(Path.cwd()):
            word = word.relative_to(Path.cwd())
        if len(line) + len(str(word)) > 74:
            lines.append(line)
            line = "   "
        line += f" {word}"
    return " \\\n".join([*lines, line])


def reload(exported: Path) -> Reloaded:
    """Load an export in another process, through `AutoModelForCausalLM`, and generate.

    Raises:
        RuntimeError: that failed.
    """
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, exported, PROMPT], capture_output=True, text=True, env=environment, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the export {exported} cannot be loaded:\n{done.stderr}")
    seen = json.loads(done.stdout.splitlines()[-1])
    inputs = load_tokenizer(exported)(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        logits = load_model(exported)(**inputs).logits[0, -1]
    return Reloaded(seen["module"], seen["text"], (torch.tensor(seen["logits"]) - logits).abs().max().item())


def measure_perplexities(models: dict[str, Path]) -> Perplexities:
    """Perplexity of each model on text that none of the recipe's stages trains on.

    Args:
        models: name and checkpoint folder of each; they share the first one's tokenizer.
    """
    tokenizer = load_tokenizer(next(iter(models.values())))
    _, _, tail = asset_path("kjv.txt").read_bytes()[-HELD_OUT_BYTES:].decode("utf-8").partition("\n")
    text = re.sub(r"\s+(\w+:\d+ )?", " ", tail.partition(" ")[2])  # without verse numbers, as in training
    rows = torch.tensor(tokenizer(text)["input_ids"][:HELD_OUT_TOKENS]).view(-1, SEQUENCE_LENGTH)
    recipe = load_recipe("demo")
    stage = recipe.stages[-1]
    prose, answers = {}, {}
    with tempfile.TemporaryDirectory() as scratch:
        prepare(stage, tokenizer, Path(scratch, "data"), scored=recipe.evaluation.tokens, seed=recipe.seed)
        questions = Sequences(Path(scratch, "data"), stage)
        for name, folder in track(models.items(), "scoring held-out text", len(models)):
            network = load_model(folder)
            with torch.inference_mode():
                losses = [network(input_ids=row[None], labels=row[None], use_cache=False).loss.item() for row in rows]
            prose[name] = math.exp(sum(losses) / len(losses))
            answers[name] = evaluate(network, questions, max_tokens=HELD_OUT_TOKENS, batch_size=1)["perplexity"]
    return Perplexities(prose, answers)
