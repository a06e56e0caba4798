"""What the README says can be done works: its commands are run, with the tiny checkpoint for the large one."""

import re
import shlex
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
import yaml
from huggingface_hub import HfApi

from palimpsa_surgery.cli.main import app, main
from palimpsa_surgery.stages import demo
from palimpsa_surgery.stages.recipe import load_recipe, shipped_recipes

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
MODEL, REPOSITORY = "state-spaces/mamba2-2.7b", "me/palimpsa-2.7b"


def shell_commands(of: str = "") -> list[list[str]]:
    """The commands of all shell blocks of that language, split into words; the demo's output is none."""
    shown = README.partition("<!-- demo -->")[2].partition("<!-- /demo -->")[0]
    blocks = [text for language, text in BLOCKS if language == of and text not in shown]
    lines = [line for text in blocks for line in text.replace("\\\n", "").splitlines()]
    return [shlex.split(line) for line in lines if line.startswith("palimpsa-surgery ")]


@pytest.fixture(scope="module")
def exported(tmp_path_factory, tiny_checkpoint, kjv) -> Path:
    """The README's way from a pretrained model to an export, walked in its order with small numbers."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "text.jsonl").write_text('{"text": "' + kjv.read_text()[:6000].replace("\n", " ") + '"}\n')
    recipe = yaml.safe_load(shipped_recipes()["demo"].read_text())
    sizes = {"sequence_length": 512, "batch_tokens": 512, "tokens": 1024}
    recipe |= {"model": {}, "stages": [stage | sizes for stage in recipe["stages"][-1:]]}
    (folder / "recipe.yaml").write_text(load_recipe_text(recipe))
    verbs = []
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setenv("HF_TOKEN", "hf_test")
        patch.setattr(HfApi, "create_repo", lambda *_, **__: SimpleNamespace(repo_id=REPOSITORY))
        patch.setattr(HfApi, "upload_folder", lambda *_, **__: None)
        for _, *words in shell_commands():
            verbs.append(words[0])
            assert main([str(tiny_checkpoint) if word == MODEL else word for word in words]) == 0, words
    assert verbs == ["analyze", "replace", "train", "export"]
    return folder / "exported"


def load_recipe_text(recipe: dict) -> str:
    """YAML of a recipe; PyYAML reads 1e-4 as text, which a strict recipe refuses."""
    text = yaml.safe_dump(recipe)
    return re.sub(r"'(\d+e-\d+)'", r"\1", text)


def test_the_commands_lead_to_an_export(exported):
    assert (exported / "model.safetensors").is_file()
    assert (exported / "README.md").is_file()


def test_the_python_code_loads_it(exported):
    code = PYTHON[0]
    scope: dict = {}
    exec(code.replace(REPOSITORY, str(exported)), scope)
    ids = scope["tokenizer"]("In the beginning", return_tensors="pt")
    assert scope["model"].generate(**ids, max_new_tokens=4).shape[1] == ids["input_ids"].shape[1] + 4


def test_the_commands_evaluate_it(exported, tiny_checkpoint, monkeypatch):
    """With a task of our own for the presets, whose data are on the Hub, and short text."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed")
    monkeypatch.chdir(exported.parent)
    Path("rows.jsonl").write_text('{"text": "In the beginning God created", "label": 0}\n')
    task = {
        "task": "mine",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(Path("rows.jsonl").absolute())}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": ["the heaven", "the sea"],
        "doc_to_target": "label",
    }
    Path("my-tasks.yaml").write_text(yaml.safe_dump(task))
    Path("other.yaml").write_text(yaml.safe_dump(task | {"task": "other"}))  # a card takes a task's scores once
    assert main(["replace", str(tiny_checkpoint), "--top-k", "0", "--output", "control"]) == 0
    exec(PYTHON[1].replace("count=100", "count=1").replace("(500, 1000)", "(150, 200)"), {})
    ours = {"commonsense": "my-tasks.yaml", "ruler": "other.yaml", "65536": "64", "32768": "64"}
    short = {"diagnose": ["--sequences", "1", "--remembrance-points", "2"], "compare": ["--sequences", "1"]}
    monkeypatch.setattr("palimpsa_surgery.surgery.speed._DECODED", 2)
    monkeypatch.setattr("palimpsa_surgery.surgery.diagnosis.plot_diagnosis", lambda *_: None)  # the slowest part
    verbs = []
    for _, *words in shell_commands("sh"):
        if "--lengths" in words:
            at = words.index("--lengths")
            del words[at : at + 2]
        verbs.append(words[0])
        assert main([*(ours.get(word, word) for word in words), *short.get(words[0], [])]) == 0, words
    assert verbs == ["eval", "eval", "eval", "diagnose", "compare", "export"]
    assert "| mine acc ↑ |" in (exported / "README.md").read_text()
    assert sorted(path.name for path in Path("scores").iterdir()) == ["commonsense", "mine", "ruler"]


def test_the_python_code_asks_nothing():
    """Without the flag transformers asks whoever has not imported this package whether to run the export's code."""
    calls = re.findall(r"from_pretrained\(([^)]*)\)", "".join(PYTHON))
    assert len(calls) == 3
    assert all("trust_remote_code=True" in call for call in calls), calls


def test_make_knows_the_targets():
    targets = sorted(set(re.findall(r"`?make (\w+)`?", README)))
    assert targets == ["demo", "test"]
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_options_exist():
    known = {name for sub in typer.main.get_command(app).commands.values() for p in sub.params for name in p.opts}
    text = re.sub(r"<!--.*?-->", "", README)
    text = re.sub(r"(?:torchrun|accelerate launch) .*?(?= -m |`|$)", "", text, flags=re.MULTILINE)  # launchers' own
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text)) <= known


def test_files_exist():
    (tree,) = [text for _, text in BLOCKS if text.startswith("src/palimpsa_surgery/")]
    folder, found = ROOT / "src" / "palimpsa_surgery", 0
    for line in tree.splitlines()[1:]:
        if match := re.match(r"  (\w+/)", line):
            part = folder / match[1]
        elif line.startswith(("tests", "docs")):
            part = ROOT
        for name in re.findall(r"[\w/]+\.(?:py|md)|\b\w+/", line):
            assert (part / name).exists() or (part.parent / name).exists(), name
            found += 1
    assert found > 10


def test_the_demo_shown_is_the_demo():
    shown = README.partition("<!-- demo -->")[2].partition("<!-- /demo -->")[0]
    titles = [line[3:] for line in shown.splitlines() if re.match(r"\d\. ", line)]
    source = Path(demo.__file__).read_text(encoding="utf-8").replace("{TOP_K}", str(demo.TOP_K))
    assert len(titles) == 6
    for title in titles:
        assert f'"{title}"' in source, title
    assert f"palimpsa-surgery train demo-output/hybrid --recipe {load_recipe('demo').name}" in shown
