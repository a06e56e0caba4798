"""Recipes: what is accepted, what is refused, and how the refusal reads."""

import pytest
import yaml

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.recipe import Recipe, differences, load_recipe, shipped_recipes


def stage_of(recipe: dict) -> dict:
    return recipe["stages"][0]


def hub(**changes) -> dict:
    return {"kind": "text", "hub": {"dataset": "me/set"} | changes}


HALF = {"by": "a", "range": [0, 0.5]}


def txt(**changes) -> dict:
    return {"kind": "text", "files": ["asset:kjv.txt"]} | changes


def mixture(*shares: float | None, **changes) -> dict:
    part = {"kind": "text", "files": ["asset:demo-chapters.jsonl"]}
    return {"kind": "mixture", "sources": [part | ({} if s is None else {"share": s}) | changes for s in shares]}


def task(**changes) -> dict:
    return {"kind": "synthetic", "task": "passkey", "length": 20} | changes


# (id, change made to a valid recipe, what the error says)
WRONG = [
    ("unknown-key", lambda r: stage_of(r).update(lerning_rate=1), "stages[0].lerning_rate: unknown key (did you"),
    ("unknown-nested-key", lambda r: stage_of(r)["data"].update(colum="x"), "stages[0].data.colum: unknown key"),
    ("unknown-top-key", lambda r: r.update(lora={}), "lora: unknown key (known: name"),
    ("missing", lambda r: stage_of(r).pop("tokens"), "stages[0].tokens: required"),
    ("text-for-number", lambda r: stage_of(r).update(tokens="10B"), "stages[0].tokens: must be a whole number"),
    ("float-for-int", lambda r: stage_of(r).update(tokens=320.0), "stages[0].tokens: must be a whole number"),
    ("number-as-text", lambda r: stage_of(r).update(clip="1.0"), "stages[0].clip: must be a number, got '1.0'"),
    ("negative", lambda r: stage_of(r).update(learning_rate=-1e-4), "learning_rate: must be greater than 0, got"),
    ("rate-in-percent", lambda r: stage_of(r).update(learning_rate=2.0), "learning_rate: must be less than or"),
    ("infinite", lambda r: stage_of(r).update(clip=float("inf")), "stages[0].clip: must be a finite number"),
    ("int-for-bool", lambda r: stage_of(r).update(packing={"reset_at_documents": 1}), "packing.reset_at_docu"),
    ("tokens-vs-batch", lambda r: stage_of(r).update(tokens=100), "tokens: 100 is not a multiple of batch_tokens 64"),
    ("batch-vs-length", lambda r: stage_of(r).update(batch_tokens=80), "80 is not a multiple of sequence_length 32"),
    ("micro-batch", lambda r: stage_of(r).update(micro_batch_tokens=48), "micro_batch_tokens: 48 is not a multip"),
    ("micro-vs-batch", lambda r: stage_of(r).update(micro_batch_tokens=96), "96 does not divide batch_tokens 64"),
    ("warmup", lambda r: stage_of(r).update(warmup_steps=5), "warmup_steps: 5 must be fewer than the stage's 5"),
    ("schedule", lambda r: stage_of(r).update(schedule={"kind": "linear"}), "stages[0].schedule.kind: must be"),
    ("betas", lambda r: stage_of(r).update(betas=[0.9]), "stages[0].betas[1]: required"),
    ("data-kind", lambda r: stage_of(r)["data"].update(kind="chat"), "stages[0].data.kind: must be one of text"),
    ("no-files", lambda r: stage_of(r)["data"].update(files=[]), "stages[0].data.files: must not be empty"),
    ("no-stages", lambda r: r.update(stages=[]), "stages: must not be empty"),
    ("missing-file", lambda r: stage_of(r)["data"].update(files=["no.txt"]), "files[0]: no such file: /"),
    ("file-kind", lambda r: stage_of(r)["data"].update(files=["recipe.yaml"]), "files[0]: must end in .txt, .js"),
    ("missing-asset", lambda r: stage_of(r)["data"].update(files=["asset:no.txt"]), "files[0]: 'no.txt' is not"),
    ("same-name", lambda r: r["stages"][1].update(name="first"), "stages: two stages are named 'first'"),
    ("name", lambda r: stage_of(r).update(name="../up"), "stages[0].name: string must match"),
    ("seed", lambda r: r.update(seed=-1), "seed: must be greater than or equal to 0, got -1"),
    ("no-source", lambda r: stage_of(r)["data"].pop("files"), "stages[0].data.hub: give either files or hub"),
    ("two-sources", lambda r: stage_of(r)["data"].update(hub={"dataset": "a/b"}), "data.hub: give either files or"),
    ("hub-key", lambda r: stage_of(r).update(data=hub(subset="x")), "stages[0].data.hub.subset: unknown key (known: "),
    ("hub-id", lambda r: stage_of(r).update(data=hub(dataset="a/b/c")), "data.hub.dataset: string must match"),
    ("hub-files", lambda r: stage_of(r).update(data=hub(data_files=[])), "data.hub.data_files: must not be empty"),
    (
        "hub-none",
        lambda r: stage_of(r).update(data=hub(dataset="json")),
        "data.hub.data_files: required, since json re",
    ),
    ("huge", lambda r: stage_of(r).update(tokens=64 * 10**30), "stages[0].tokens: must be no more than 90071992547"),
    ("filter", lambda r: stage_of(r)["data"].update(filter={"a": {}}), "data.filter: a must hold a value or a list"),
    ("part-txt", lambda r: stage_of(r).update(data=txt(part=HALF)), "data.part: part needs columns, and a .txt"),
    ("part-by", lambda r: stage_of(r)["data"].update(part={"range": [0, 1]}), "stages[0].data.part.by: required"),
    (
        "part-end",
        lambda r: stage_of(r)["data"].update(part=HALF | {"range": [0, 2]}),
        "data.part.range[1]: must be les",
    ),
    (
        "part-empty",
        lambda r: stage_of(r)["data"].update(part=HALF | {"range": [0.5, 0.5]}),
        "data.part.range: must begin below its end, got [0.5, 0.5]",
    ),
    ("part-of", lambda r: stage_of(r)["data"].update(part=HALF | {"column": "a"}), "data.part.column: unknown key (kn"),
    ("group-txt", lambda r: stage_of(r).update(data=txt(group_by="a")), "data.group_by: group_by needs columns, and"),
    ("filter-txt", lambda r: stage_of(r).update(data=txt(filter={"a": 1})), "data.filter: filter needs columns, and"),
    ("window", lambda r: stage_of(r)["data"].update(group_window=1), "data.group_window: must be greater than or"),
    ("shares", lambda r: stage_of(r).update(data=mixture(0.5, 0.3)), "data.sources: the shares must sum to 1, got 0.8"),
    ("share", lambda r: stage_of(r).update(data=mixture(1.5)), "data.sources[0].share: must be less than or"),
    ("negative", lambda r: stage_of(r).update(data=mixture(-0.5, 1)), "data.sources[0].share: must be greater than 0"),
    ("no-share", lambda r: stage_of(r).update(data=mixture(None, 1)), "stages[0].data.sources[0].share: required"),
    ("part-kind", lambda r: stage_of(r).update(data=mixture(1, kind="mixture")), "data.sources[0].kind: must be one"),
    ("part-key", lambda r: stage_of(r).update(data=mixture(1, repeats=True)), "sources[0].repeats: unknown key (did"),
    ("part-held-out", lambda r: stage_of(r).update(data=mixture(1, held_out=0.1)), "sources[0].held_out: unknown key"),
    ("part-file", lambda r: stage_of(r).update(data=mixture(1, files=["no.jsonl"])), "sources[0].files[0]: no such f"),
    ("no-parts", lambda r: stage_of(r).update(data={"kind": "mixture", "sources": []}), "data.sources: must not be em"),
    ("task", lambda r: stage_of(r).update(data=task(task="mqar")), "stages[0].data.task: must be one of passkey"),
    (
        "task-option",
        lambda r: stage_of(r).update(data=task(options={"keys": 2})),
        "data.options: task 'passkey' has",
    ),
    (
        "task-files",
        lambda r: stage_of(r).update(data=task(options={"files": ["no.txt"]})),
        "data.options: no such",
    ),
    (
        "task-length",
        lambda r: stage_of(r).update(data=task(length=32)),
        "sequence_length: 32 is too short for",
    ),
    (
        "task-shortest",
        lambda r: stage_of(r).update(data=task(min_length=30)),
        "data.min_length: 30 is more than",
    ),
    (
        "tbtt-task",
        lambda r: stage_of(r).update(data=task(), state={"kind": "tbtt"}),
        "state: tbtt needs data of kind text",
    ),
    ("task-learn", lambda r: stage_of(r).update(data=task(learn="none")), "stages[0].data.learn: must be 'answer' or"),
    ("init", lambda r: r.update(model={"init": "zeros"}), "model.init: must be 'calibrated' or 'paper', got"),
]


@pytest.mark.parametrize(("change", "message"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_mistake_names_its_field_in_one_line(recipe_dict, write_recipe, change, message):
    recipe_dict["stages"] = [dict(stage, data=dict(stage["data"])) for stage in recipe_dict["stages"]]
    change(recipe_dict)
    with pytest.raises(UserError) as error:
        load_recipe(write_recipe(recipe_dict))
    assert message in str(error.value)
    assert str(error.value).startswith("recipe recipe.yaml: ")
    assert "\n" not in str(error.value)
    assert "; " not in str(error.value), "one mistake, one complaint"


def test_text_of_a_mixture_can_be_read_on(recipe_dict, write_recipe):
    recipe_dict["stages"] = [recipe_dict["stages"][0] | {"data": mixture(0.5, 0.5), "state": {"kind": "tbtt"}}]
    assert load_recipe(write_recipe(recipe_dict)).stages[0].state.kind == "tbtt"


def test_all_mistakes_are_reported_at_once(recipe_dict, write_recipe):
    recipe_dict["stages"][1].update(tokens="many", clip=0)
    with pytest.raises(UserError, match=r"stages\[1\]\.tokens: .*; stages\[1\]\.clip: must be greater than 0"):
        load_recipe(write_recipe(recipe_dict))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "must be a mapping with the keys name, description"),
        ("- a\n", "must be a mapping"),
        ("name: [", "is not valid YAML"),
        ("name: a\nname: b\n", "key 'name' is given twice"),
        ("name: 2020-01-01\n", "holds a value that is no text, number or list"),
        (
            "a0: &a0 [x, x]\n" + "".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)),
            "more than 10,000",
        ),
        ("name: &a [*a]\n", "more than 10,000 values"),
        ("name: 2020-13-45\n", "holds a value that cannot be read: month must be in"),
        ("seed: !!int ''\n", "holds a value that cannot be read"),
        ("seed: " + "9" * 5000, "holds a value that cannot be read"),
        ("name: " + "[" * 2000, "is nested too deeply|is not valid YAML"),
        ("#" * (1 << 20) + "\nname: a\n", "is larger than 1,048,576 bytes"),
    ],
    ids=[
        "empty",
        "list",
        "broken",
        "twice",
        "date",
        "aliases",
        "itself",
        "month",
        "no number",
        "digits",
        "deep",
        "large",
    ],
)
def test_not_a_recipe(write_recipe, content, message):
    with pytest.raises(UserError, match=message) as error:
        load_recipe(write_recipe(content))
    assert "\n" not in str(error.value)


def test_unknown_name_lists_the_shipped_ones():
    with pytest.raises(UserError, match=r"'mamba9' is neither a file nor one of: .*demo"):
        load_recipe("mamba9")


@pytest.mark.parametrize("name", shipped_recipes())
def test_shipped_recipe_loads_by_name(name):
    recipe = load_recipe(name)
    assert recipe.name == name
    assert recipe == load_recipe(shipped_recipes()[name])


def test_scientific_notation_is_a_number(recipe_dict, write_recipe):
    text = yaml.safe_dump(recipe_dict).replace("learning_rate: 0.001", "learning_rate: 1e-3")
    assert "1e-3" in text
    assert load_recipe(write_recipe(text)).stages[0].learning_rate == 1e-3


def test_relative_files_count_from_the_recipe(recipe_dict, write_recipe, tmp_path, monkeypatch):
    (tmp_path / "here.txt").write_text("text")
    monkeypatch.chdir("/")
    recipe_dict["stages"][0]["data"]["files"] = ["here.txt"]
    assert load_recipe(write_recipe(recipe_dict)).stages[0].data.files == (str(tmp_path / "here.txt"),)


def test_empty_file(recipe_dict, write_recipe, tmp_path):
    (tmp_path / "empty.txt").touch()
    recipe_dict["stages"][0]["data"]["files"] = ["empty.txt"]
    with pytest.raises(UserError, match=r"stages\[0\]\.data\.files\[0\]: file is empty"):
        load_recipe(write_recipe(recipe_dict))


@pytest.mark.parametrize(
    ("template", "right"),
    [
        ("{prompt}{answer}", True),
        ("Q: {prompt}\nA: {answer}", True),
        ("{prompt}", False),
        ("{answer}", False),
        ("{answer} {prompt}", False),
        ("{prompt} {answer}.", False),
        ("{prompt} {prompt} {answer}", False),
        ("{answer} {prompt} {answer}", False),
    ],
)
def test_instruction_template(recipe_dict, write_recipe, text_file, template, right):
    data = {"kind": "instruction", "files": [str(text_file)], "template": template}
    recipe_dict["stages"] = [{**recipe_dict["stages"][0], "data": data}]
    path = write_recipe(recipe_dict)
    if right:
        assert load_recipe(path).stages[0].data.template == template
    else:
        with pytest.raises(UserError, match=r"data\.template: must hold {prompt} once and end in its only {answer}"):
            load_recipe(path)


def test_resolved_recipe_is_the_same_recipe(small_recipe, write_recipe):
    again = load_recipe(write_recipe(small_recipe.to_yaml(), "resolved.yaml"))
    assert again == small_recipe
    assert again.stages[0].betas == (0.9, 0.95)


def test_recipes_do_not_change(small_recipe):
    with pytest.raises(ValueError, match="frozen"):
        small_recipe.seed = 1
    assert isinstance(small_recipe, Recipe)


def test_sizes_follow_from_tokens(small_recipe):
    first, second = small_recipe.stages
    assert (first.steps, first.batch_sequences, first.micro_batch_sequences) == (5, 2, 2)
    assert (second.steps, second.batch_sequences) == (5, 1)


def test_differences_name_the_place():
    old = {"seed": 0, "stages": [{"tokens": 1, "betas": [0.9, 0.95]}], "gone": 1}
    new = {"seed": 0, "stages": [{"tokens": 2, "betas": [0.9, 0.99]}], "added": 1}
    assert list(differences(old, new)) == [
        "stages[0].tokens was 1, is 2",
        "stages[0].betas[1] was 0.95, is 0.99",
        "gone is gone",
        "added is new",
    ]
    assert list(differences(old, old)) == []
