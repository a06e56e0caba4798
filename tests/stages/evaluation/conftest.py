"""A small hybrid and tasks for it; nothing is fetched, nor kept in the user's cache."""

import json
from pathlib import Path

import datasets
import pytest
import torch
import yaml

from palimpsa_surgery.stages.synthetic import generate, write_lm_eval_tasks
from palimpsa_surgery.surgery.checkpoints import save_checkpoint
from stages.conftest import make_small_model

STORY = "And Isaac went out to meditate in the field at the eventide: and he lifted up his eyes, and saw, and, behold,"
ROW = json.dumps({"text": "In the", "choices": [" beginning", " end"], "gold": 0})
BEASTS = ("camels", "oxen", "sheep", "kings of the land of Canaan and all their hosts")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.getbasetemp() / "datasets")


def choice_task(name: str, file: Path) -> dict:
    metrics = [{"metric": name, "aggregation": "mean", "higher_is_better": True} for name in ("acc", "acc_norm")]
    return {
        "task": name,
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(file)}},
        "test_split": "test",
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{gold}}",
        "target_delimiter": "",
        "metric_list": metrics,
        "metadata": {"version": 3.0},
    }


@pytest.fixture(scope="session")
def hybrid(tmp_path_factory, tokenizer) -> Path:
    """Two layers, the second a Palimpsa layer whose importance matters, in float32."""
    folder = tmp_path_factory.mktemp("evaluation") / "hybrid"
    folder.mkdir()
    model = make_small_model()
    with torch.no_grad():
        model.backbone.layers[1].mixer.b_scale.fill_(2.0)
    save_checkpoint(model, folder, tokenizer=tokenizer, dtype=torch.float32)
    return folder


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory, tokenizer) -> Path:
    """Generated tasks of ours, and one in which continuations are scored."""
    folder = tmp_path_factory.mktemp("tasks") / "tasks"
    kinds = {"key": "passkey", "needles": "niah_multiquery"}
    examples = {n: list(generate(k, tokenizer=tokenizer, length=300, count=3, seed=2)) for n, k in kinds.items()}
    write_lm_eval_tasks(examples, folder)
    rows = [
        {"text": f"{STORY} the {beast} were", "choices": [" coming", " and the sea"], "gold": 0} for beast in BEASTS
    ]
    (folder / "beasts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "beasts.yaml").write_text(yaml.safe_dump(choice_task("beasts", folder / "beasts.jsonl")))
    return folder
