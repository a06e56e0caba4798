"""An export loads anywhere, with the same bits, and says what it is."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
import venv
from importlib.metadata import distribution
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from huggingface_hub import HfApi
from huggingface_hub.errors import (
    BadRequestError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)
from packaging.requirements import Requirement
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Mamba2ForCausalLM

import palimpsa_surgery.hf_models
from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.pipeline import train
from palimpsa_surgery.surgery import card, upload
from palimpsa_surgery.surgery.checkpoints import fingerprint, load_model, open_source
from palimpsa_surgery.surgery.export import AUTO_MAP, Export, code_files, export, without_paths
from palimpsa_surgery.surgery.replacement import replace
from surgery.test_results import make_evaluation

PACKAGE = Path(palimpsa_surgery.hf_models.__file__).parents[1]
IDS = torch.tensor([[1205, 263, 3122, 1004, 17, 1205, 263, 99]])

RECIPE = {
    "name": "two-steps",
    "description": "Two steps, to have a run.",
    "stages": [
        {
            "name": name,
            "data": {"kind": "text", "files": ["asset:kjv.txt"], "max_tokens": 4096, "held_out": 0.1},
            "sequence_length": length,
            "batch_tokens": 128,
            "tokens": 256,
            "learning_rate": 1e-4,
            "importance_learning_rate": 1e-3,
        }
        for name, length in (("short", 64), ("long", 128))
    ],
}


@pytest.fixture(scope="module")
def hybrid(tiny_checkpoint, tmp_path_factory) -> Path:
    """A checkpoint with two Palimpsa layers whose importance matters, and records of where it came from."""
    folder = tmp_path_factory.mktemp("made") / "hybrid"
    replace(tiny_checkpoint, folder, layers=[3, 8], init="paper")
    record = json.loads((folder / "surgery.json").read_text())
    record |= {
        "base_model": "state-spaces/mamba2-tiny",
        "analysis": {"median_windows": {str(layer): 10.5 * layer + 1 for layer in range(12)}, "tokens": 1000},
        "drift": {"relative": 0.01, "kl": 2e-4, "max_importance_ratio": 0.1, "tokens": 1024},
    }
    (folder / "surgery.json").write_text(json.dumps(record))
    (folder / "windows.png").write_bytes(b"a figure")
    return folder


@pytest.fixture(scope="module")
def exported(hybrid) -> Export:
    return export(hybrid, hybrid.parent / "exported.v1")  # a dot, which transformers has to escape


@pytest.fixture(scope="module")
def control(tiny_checkpoint, hybrid) -> Export:
    """The untouched Mamba2, converted and exported."""
    replace(tiny_checkpoint, hybrid.parent / "control", top_k=0)
    return export(hybrid.parent / "control", hybrid.parent / "exported-control")


@pytest.fixture(scope="module")
def run(hybrid) -> Path:
    folder = hybrid.parent / "run"
    recipe = hybrid.parent / "two-steps.yaml"
    recipe.write_text(yaml.safe_dump(RECIPE))
    train(hybrid, recipe, folder)
    return folder


def packages_of(*names: str) -> set[str]:
    """These distributions and all that they require, without extras."""
    found, wanted = set(), list(names)
    while wanted:
        name = re.sub(r"[-_.]+", "-", wanted.pop()).lower()
        if name in found:
            continue
        found.add(name)
        for requirement in map(Requirement, distribution(name).requires or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                wanted.append(requirement.name)
    return found


@pytest.fixture(scope="module")
def stranger(tmp_path_factory):
    """Run a script in a second virtual environment: torch, transformers, safetensors and nothing of ours."""
    folder = tmp_path_factory.mktemp("stranger")
    venv.create(folder / "venv", symlinks=True, with_pip=False)
    python = folder / "venv" / "bin" / "python"
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    site = folder / "venv" / "lib" / version / "site-packages"
    for package in packages_of("torch", "transformers", "safetensors"):
        found = distribution(package)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (site / top).is_symlink():
                (site / top).symlink_to(Path(found.locate_file(top)))

    def call(script: str, **environment: str) -> str:
        path = folder / "script.py"
        path.write_text(textwrap.dedent(script))
        keep = {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "OMP_NUM_THREADS") if name in os.environ}
        fresh = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        done = subprocess.run(
            [python, path], env=keep | fresh | environment, cwd=folder, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return call


@pytest.fixture(scope="module")
def strangers_view(stranger, exported, control) -> dict:
    """What a stranger sees of the two exports, each Auto class with its result."""
    stdout = stranger(f"""
        import importlib.util, json, torch
        from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer

        name, ids = {str(exported.path)!r}, torch.tensor({IDS.tolist()})
        missing = [m for m in ("palimpsa_surgery", "mamba_ssm", "causal_conv1d", "datasets", "accelerate")
                   if importlib.util.find_spec(m) is None]
        seen = {{"missing": missing}}
        config = AutoConfig.from_pretrained(name, trust_remote_code=True)
        seen["AutoConfig"] = [type(config).__name__, config.palimpsa_layers, config.max_position_embeddings]
        body = AutoModel.from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
        seen["AutoModel"] = [type(body).__name__, body(ids).last_hidden_state[0, -1, :5].tolist()]
        model = AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True, dtype=torch.float32)
        seen["AutoModelForCausalLM"] = [type(model).__name__, model(ids).logits[0].tolist()]
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=True)
        inputs = tokenizer("In the beginning", return_tensors="pt")
        seen["AutoTokenizer"] = [tokenizer.model_max_length, inputs["input_ids"].tolist()]
        seen["stored"] = str(AutoModelForCausalLM.from_pretrained(name, trust_remote_code=True).dtype)
        seen["text"] = tokenizer.decode(model.generate(**inputs, max_new_tokens=8, do_sample=False)[0])
        control = AutoModelForCausalLM.from_pretrained({str(control.path)!r}, dtype=torch.float32)
        length = AutoTokenizer.from_pretrained({str(control.path)!r}).model_max_length
        seen["control"] = [type(control).__name__, length, control(ids).logits[0].argmax(-1).tolist()]
        print(json.dumps(seen))
    """)
    return json.loads(stdout.splitlines()[-1])


def test_the_strangers_environment_is_clean(strangers_view):
    assert {"palimpsa_surgery", "mamba_ssm", "datasets", "accelerate"} <= set(strangers_view["missing"])


@pytest.mark.parametrize("entry", AUTO_MAP)
def test_each_auto_map_entry_loads_in_a_clean_environment(strangers_view, exported, entry):
    model = load_model(exported.path)
    name, *seen = strangers_view[entry]
    assert name == AUTO_MAP[entry].split(".")[1]
    if entry == "AutoConfig":
        assert seen == [[3, 8], 2048]
    elif entry == "AutoModel":
        assert seen[0] == model.backbone(IDS).last_hidden_state[0, -1, :5].tolist()
    else:
        assert torch.equal(torch.tensor(seen[0]), model(IDS).logits[0])


def test_tokenizer_and_generation_work_in_a_clean_environment(strangers_view, exported):
    tokenizer = AutoTokenizer.from_pretrained(exported.path)
    inputs = tokenizer("In the beginning", return_tensors="pt")
    assert strangers_view["AutoTokenizer"] == [2048, inputs["input_ids"].tolist()]
    expected = load_model(exported.path).generate(**inputs, max_new_tokens=8, do_sample=False)
    assert strangers_view["text"] == tokenizer.decode(expected[0])
    assert strangers_view["stored"] == "torch.float16"


def test_weights_are_the_sources_bits(hybrid, exported):
    before, after = load_file(hybrid / "model.safetensors"), load_file(exported.path / "model.safetensors")
    assert before.keys() == after.keys()
    for name, value in before.items():
        assert value.dtype == after[name].dtype
        assert torch.equal(value, after[name]), name


def test_save_and_load_again_is_bit_exact(exported, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(exported.path)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    for (name, value), other in zip(model.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(value, other), name


def test_code_is_the_packages_but_for_its_imports(exported):
    written = {path.name: path.read_text() for path in exported.path.glob("*.py")}
    assert written == code_files()
    assert {"modeling_palimpsa_mamba2.py", "configuration_palimpsa_mamba2.py", "scan.py"} <= written.keys()
    for name, text in written.items():
        (source,) = [path for part in ("hf_models", "kernels") for path in [PACKAGE / part / name] if path.exists()]
        ours, theirs = source.read_text().splitlines(), text.splitlines()
        assert len(ours) == len(theirs)
        for before, after in zip(ours, theirs, strict=True):
            if before != after:
                assert re.match(r"\s*from \.\.kernels\.\w+ import ", before), before
                assert after == before.replace("from ..kernels.", "from ."), after
        for module in re.findall(r"^\s*from \.(\S*) import", text, re.MULTILINE):
            assert f"{module}.py" in written, f"{name} imports {module}, which is not carried"


def test_where_the_package_is_installed_no_flag_is_needed(exported):
    model = AutoModelForCausalLM.from_pretrained(exported.path)
    assert type(model) is palimpsa_surgery.hf_models.PalimpsaMamba2ForCausalLM


def test_two_exports_and_the_package_in_one_process(exported, hybrid, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    second = export(hybrid, tmp_path / "second").path
    scan = second / "scan.py"
    scan.write_text(scan.read_text() + "\n# a later release\n")
    script = f"""
        import torch
        from transformers import AutoModelForCausalLM
        a, b = (AutoModelForCausalLM.from_pretrained(p, trust_remote_code=True, dtype=torch.float32)
                for p in ({str(exported.path)!r}, {str(second)!r}))
        import palimpsa_surgery.hf_models
        c = AutoModelForCausalLM.from_pretrained({str(second)!r}, dtype=torch.float32)
        assert len({{type(a), type(b), type(c)}}) == 3, (type(a), type(b), type(c))
        ids = torch.tensor({IDS.tolist()})
        loss = [m(ids, labels=ids).loss for m in (a, b, c)]
        for value in loss:
            value.backward()
        assert loss[0] == loss[1] == loss[2], loss
    """
    environment = os.environ | {"TRANSFORMERS_VERBOSITY": "error"}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_stale_code_is_overwritten(exported, hybrid, tmp_path):
    """Whether in the folder written to, or in the exported folder that is exported once more."""
    output = tmp_path / "out"
    output.mkdir()
    (output / "modeling_palimpsa_mamba2.py").write_text("raise RuntimeError('stale')")
    with pytest.raises(UserError, match="not empty"):
        export(hybrid, output)
    export(hybrid, output, overwrite=True)
    assert (output / "modeling_palimpsa_mamba2.py").read_text() == code_files()["modeling_palimpsa_mamba2.py"]

    (output / "modeling_palimpsa_mamba2.py").write_text("raise RuntimeError('stale')")
    (output / "left_over.py").write_text("raise RuntimeError('stale')")
    again = export(output, tmp_path / "again").path
    assert {path.name: path.read_text() for path in again.glob("*.py")} == code_files()


def test_an_exported_checkpoint_that_is_operated_on_again_has_no_stale_auto_map(exported, tmp_path):
    replace(exported.path, tmp_path / "more", layers=[9], init="paper")
    assert "auto_map" not in json.loads((tmp_path / "more" / "config.json").read_text())


def test_a_control_needs_no_code(tiny_checkpoint, control, strangers_view):
    assert control.palimpsa_layers == ()
    assert not list(control.path.glob("*.py"))
    config = json.loads((control.path / "config.json").read_text())
    assert config["model_type"] == "mamba2"
    assert "auto_map" not in config
    assert "trust_remote_code" not in (control.path / "README.md").read_text()
    expected = load_model(tiny_checkpoint)(IDS).logits[0].argmax(-1).tolist()
    assert strangers_view["control"] == ["Mamba2ForCausalLM", 2048, expected]
    assert isinstance(AutoModelForCausalLM.from_pretrained(control.path), Mamba2ForCausalLM)


@pytest.mark.parametrize(
    ("max_length", "expected", "reason"),
    [(None, 128, "as in the run's longest stage"), (4096, 4096, "as asked for")],
    ids=["recipe", "option"],
)
def test_lengths_are_stated_for_evaluation_harnesses(run, tmp_path, max_length, expected, reason):
    done = export(run, tmp_path / "out", max_length=max_length)
    assert (done.max_length, done.max_length_reason) == (expected, reason)
    assert json.loads((done.path / "config.json").read_text())["max_position_embeddings"] == expected
    assert AutoTokenizer.from_pretrained(done.path).model_max_length == expected
    assert open_source(done.path).config.max_position_embeddings == expected
    assert export(done.path, tmp_path / "again").max_length == expected, "an export states its own length"


def test_a_run_exports_its_last_stage_and_its_results(run, tmp_path):
    done = export(run, tmp_path / "out")
    record = json.loads((run / "run.json").read_text())
    final = load_file(run / record["final"] / "model.safetensors")
    assert all(torch.equal(value, final[name]) for name, value in load_file(done.path / "model.safetensors").items())

    card = (done.path / "README.md").read_text()
    for stage in record["stages"]:
        for when in ("before", "after"):
            assert f"{stage[when]['perplexity']:.2f}" in card
    assert "two-steps" in card
    assert "`asset:kjv.txt`" in card
    everything = "".join(path.read_text() for path in done.path.iterdir() if path.suffix in (".json", ".md", ".yaml"))
    assert str(run.parent) not in everything, "an export must not tell where it was made"
    assert yaml.safe_load((done.path / "recipe.yaml").read_text())["name"] == "two-steps"


def test_the_card_tells_of_training_only_what_is_known(run, exported, control, tmp_path):
    def training(folder: Path) -> str:
        return (folder / "README.md").read_text().split("## Training")[1].split("##")[0]

    assert "None after the surgery" in training(exported.path)
    again = export(export(run, tmp_path / "once"), tmp_path / "twice")
    assert "Not recorded" in training(again.path)
    assert yaml.safe_load((again.path / "recipe.yaml").read_text())["name"] == "two-steps"
    final = export(run / json.loads((run / "run.json").read_text())["final"], tmp_path / "final")
    assert "Not recorded" in training(final.path)
    assert "Python files" in (exported.path / "README.md").read_text()
    assert "Python files" not in (control.path / "README.md").read_text()


def test_only_paths_are_cut_from_what_is_published():
    record = {"base": "/a/model", "files": ["/b/text.txt", "asset:kjv.txt"], "template": "/no_think {prompt}"}
    assert without_paths([record]) == [
        {"base": "model", "files": ["text.txt", "asset:kjv.txt"], "template": "/no_think {prompt}"}
    ]


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        ({"kind": "text", "files": ["/a/b.txt", "c.txt"], "hub": None}, "text: `b.txt`, `c.txt`"),
        (
            {"kind": "instruction", "files": None, "hub": {"dataset": "me/set"}, "filter": {"meta.set": "a"}},
            "instruction: [`me/set`](https://huggingface.co/datasets/me/set) (meta.set a)",
        ),
        (
            {
                "kind": "mixture",
                "sources": [
                    {"kind": "text", "share": 0.75, "files": ["/a/b.txt"], "hub": None, "filter": {}},
                    {"kind": "synthetic", "share": 0.25, "task": "passkey"},
                ],
            },
            "mixture: 75.0% `b.txt`, 25.0% synthetic `passkey`",
        ),
    ],
    ids=["files", "hub", "mixture"],
)
def test_card_names_the_data(data, expected):
    assert card._data_names(data) == expected


def test_a_tokenizer_can_be_given(hybrid, tiny_checkpoint, tmp_path):
    bare = tmp_path / "bare"
    shutil.copytree(hybrid, bare, ignore=shutil.ignore_patterns("tokenizer*", "special_tokens*"))
    with pytest.raises(UserError, match="--tokenizer"):
        export(bare, tmp_path / "out")
    done = export(bare, tmp_path / "out", tokenizer=tiny_checkpoint)
    assert AutoTokenizer.from_pretrained(done.path)("And God said").input_ids


def test_the_card_says_what_the_model_is(exported):
    text = (exported.path / "README.md").read_text()
    header, body = text.split("---\n")[1:]
    metadata = yaml.safe_load(header)
    assert metadata["base_model"] == "state-spaces/mamba2-tiny"
    assert metadata["license"] == "apache-2.0"
    assert metadata["library_name"] == "transformers"
    assert metadata["pipeline_tag"] == "text-generation"
    assert {"mamba2", "palimpsa", "custom_code"} <= set(metadata["tags"])
    assert "| 3 | 32.5 | **Palimpsa** |" in body
    assert "| 4 | 43 | Mamba2 |" in body
    assert "](windows.png)" in body
    assert (exported.path / "windows.png").read_bytes() == b"a figure"
    assert "init" in body.lower()
    assert "KL 0.0002 nats" in body
    assert "Apache-2.0" in body
    code = re.search(r"```python\n(.*?)```", body, re.DOTALL)[1].replace(exported.path.name, str(exported.path))
    compile(code, "card", "exec")
    assert "trust_remote_code=True" in code


def test_the_card_shows_results_of_these_weights(hybrid, exported, tmp_path):
    weights = fingerprint(load_model(hybrid))
    for name, of in (("mine", weights), ("other", "f00")):
        (tmp_path / name).mkdir()
        make_evaluation(model_fingerprint=of, limit=20).save(tmp_path / name)
    done = export(hybrid, tmp_path / "out", results=[tmp_path / "mine"])
    header, body = (done.path / "README.md").read_text().split("---\n")[1:]
    table = body.split("## Evaluation")[1].split("## ")[0]
    assert "| N-1 (%) ↑ | 94.44 | 80.00 |" in table
    assert "at most 20 documents of each; up to 8,704 tokens, 7 documents cut from the left" in table
    assert "Note: something is missing" in table
    (model,) = yaml.safe_load(header)["model-index"]
    shown = [(r["dataset"]["name"], m["name"], m["value"]) for r in model["results"] for m in r["metrics"]]
    assert shown == [
        ("niah_single_1", "N-1 4,096", 94.44),
        ("niah_single_1", "N-1 8,192", 80.0),
        ("ruler_vt", "VT 4,096", 33.5),
    ]
    assert "model-index" not in (exported.path / "README.md").read_text()
    with pytest.raises(UserError, match=r"other holds results of other weights, those of models/hybrid"):
        export(hybrid, tmp_path / "again", results=[tmp_path / "mine", tmp_path / "other"])
    with pytest.raises(UserError, match=r"mine/results.json holds results that are given twice"):
        export(hybrid, tmp_path / "again", results=[tmp_path / "mine", tmp_path / "mine" / "results.json"])
    assert not (tmp_path / "again").exists()


class TestRefusals:
    """Each a line, and nothing written."""

    def test_native_folder(self, cli, tiny_checkpoint, tmp_path):
        outcome = cli("export", tiny_checkpoint, "--output", tmp_path / "out")
        assert "native format" in outcome.error
        assert "replace" in outcome.error
        assert "--top-k 0" in outcome.error
        assert not list(tmp_path.iterdir())

    def test_unfinished_run(self, cli, run, tmp_path):
        record = json.loads((run / "run.json").read_text())
        record["stages"][1] |= {"status": "running", "final": None}
        unfinished = tmp_path / "run"
        unfinished.mkdir()
        (unfinished / "run.json").write_text(json.dumps(record | {"final": None}))
        assert "stage long is missing" in cli("export", unfinished, "--output", tmp_path / "out").error

    def test_no_folder(self, cli, tmp_path):
        assert "is not a folder" in cli("export", tmp_path / "nothing", "--output", tmp_path / "out").error

    @pytest.mark.parametrize("where", [".", ".."], ids=["itself", "around"])
    def test_output_over_the_source(self, cli, hybrid, where):
        outcome = cli("export", hybrid, "--output", hybrid / where, "--overwrite")
        assert "choose another --output" in outcome.error
        assert (hybrid / "model.safetensors").exists()

    def test_results_that_are_none(self, cli, hybrid, tmp_path):
        error = cli("export", hybrid, "--output", tmp_path / "out", "--results", tmp_path).error
        assert error.startswith(f"there are no results at {tmp_path}")

    def test_private_without_upload(self, cli, hybrid, tmp_path):
        assert "--push-to-hub" in cli("export", hybrid, "--output", tmp_path / "out", "--private").error

    def test_max_length(self, cli, hybrid, tmp_path):
        assert "--max-length" in cli("export", hybrid, "--output", tmp_path / "out", "--max-length", 0).error


def http_error(kind: type[HfHubHTTPError], status: int, message: str) -> HfHubHTTPError:
    response = SimpleNamespace(status_code=status, headers={}, request=None, url="https://huggingface.co", text=message)
    return kind(message, response=response)


def no_network() -> Exception:
    """What a call to a Hub that cannot be reached raises."""
    kind = next(kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError")
    return kind("Name or service not known")


class TestUpload:
    """The Hub is replaced by a stand-in; everything up to huggingface_hub's own functions is real."""

    @pytest.fixture
    def hub(self, monkeypatch):
        calls = []

        def create_repo(self, repo_id, *, private, exist_ok):
            calls.append(("create", repo_id, private, exist_ok))
            full = repo_id if "/" in repo_id else f"me/{repo_id}"
            return SimpleNamespace(repo_id=full, __str__=lambda: full)

        def upload_folder(self, *, folder_path, repo_id, commit_message):
            calls.append(("upload", Path(folder_path), repo_id))

        monkeypatch.setenv("HF_TOKEN", "hf_test")
        monkeypatch.setattr(HfApi, "create_repo", create_repo)
        monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
        return calls

    def test_uploads_the_folder(self, cli, hub, hybrid, tmp_path):
        output = tmp_path / "out"
        outcome = cli("export", hybrid, "--output", output, "--push-to-hub", "hybrid", "--private")
        assert outcome.code == 0, outcome.stderr
        assert hub == [("create", "hybrid", True, True), ("upload", output, "me/hybrid")]
        assert 'name = "hybrid"' in (output / "README.md").read_text()

    @pytest.mark.parametrize(
        ("where", "error", "words"),
        [
            ("create_repo", http_error(HfHubHTTPError, 401, "Invalid user token"), "did not accept the token"),
            ("create_repo", http_error(HfHubHTTPError, 403, "Forbidden"), "may not write"),
            ("upload_folder", http_error(HfHubHTTPError, 403, "Forbidden"), "may not write"),
            ("upload_folder", http_error(RepositoryNotFoundError, 404, "Not Found"), "no such user"),
            ("upload_folder", http_error(BadRequestError, 400, "Invalid metadata"), "refused it"),
            ("upload_folder", http_error(HfHubHTTPError, 500, "Internal error"), "answered with an error"),
            ("create_repo", no_network(), "cannot be reached"),
            ("upload_folder", ConnectionResetError("Connection reset by peer"), "cannot be reached"),
            ("create_repo", OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        ],
        ids=["token", "create-rights", "write-rights", "owner", "metadata", "server", "network", "reset", "offline"],
    )
    def test_each_trouble_is_one_line_and_the_export_is_kept(
        self, cli, hub, hybrid, tmp_path, monkeypatch, where, error, words
    ):
        def fail(self, *_, **__):
            raise error

        monkeypatch.setattr(HfApi, where, fail)
        output = tmp_path / "out"
        message = cli("export", hybrid, "--output", output, "--push-to-hub", "me/hybrid").error
        assert words in message
        assert f"the export is kept in {output}" in message
        assert load_model(output).config.palimpsa_layers == [3, 8]

    def test_no_token(self, cli, hub, hybrid, tmp_path, monkeypatch):
        monkeypatch.setattr(upload, "get_token", lambda: None)
        message = cli("export", hybrid, "--output", tmp_path / "out", "--push-to-hub", "me/hybrid").error
        assert "hf auth login" in message
        assert "HF_TOKEN" in message
        assert (tmp_path / "out" / "model.safetensors").exists()
        assert hub == []

    @pytest.mark.parametrize("repo_id", ["a b", "me/it/self", "-me/x", "me/x..y"])
    def test_an_invalid_id_is_found_before_any_work(self, cli, hub, hybrid, tmp_path, repo_id):
        message = cli("export", hybrid, "--output", tmp_path / "out", f"--push-to-hub={repo_id}").error
        assert "not a Hub id" in message
        assert not (tmp_path / "out").exists()
        assert hub == []
