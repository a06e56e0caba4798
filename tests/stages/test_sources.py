"""Sources: local files and Hub sets, filters, groups, nested columns, synthetic tasks, and what is refused."""

import gzip
import json
from itertools import chain, pairwise

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

from helpers import http_error
from palimpsa_surgery.errors import Unavailable, UserError
from palimpsa_surgery.stages.data import packing, prepare
from palimpsa_surgery.stages.data.packing import SequenceStream
from palimpsa_surgery.stages.data.rows import Position
from palimpsa_surgery.stages.data.sources import GROUP_JOINT, open_source
from palimpsa_surgery.stages.recipe import load_recipe
from palimpsa_surgery.stages.recipe_data import HubSet, Part, Rows, name_of, sources_of
from palimpsa_surgery.stages.synthetic import generate, score

LESS = {"by": "id", "range": [0.1, 0.9]}
ROWS = [
    {"text": f"row {n}", "meta": {"repo": f"r{n % 3}", "language": "C++" if n % 2 else "Python"}, "id": n}
    for n in range(12)
]


@pytest.fixture
def files(tmp_path):
    """Three files of four rows, as jsonl and as parquet."""
    for part in range(3):
        rows = ROWS[4 * part : 4 * part + 4]
        (tmp_path / f"part{part}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"part{part}.parquet")
    return tmp_path


@pytest.fixture
def source(recipe_dict, write_recipe, files, tokenizer):
    """Open the source that a stage's data describe, local or through `datasets`."""

    def make(kind, seed=0, **data):
        names = [str(files / f"part{part}.{'jsonl' if kind == 'jsonl' else 'parquet'}") for part in range(3)]
        where = {"hub": {"dataset": "parquet", "data_files": names}} if kind == "hub" else {"files": names}
        recipe_dict["stages"] = [recipe_dict["stages"][0] | {"data": {"kind": "text"} | where | data}]
        return open_source(load_recipe(write_recipe(recipe_dict)).stages[0].data, tokenizer, seed=seed)

    return make


def texts(source, position=Position()):
    return [unit[0] for unit, _ in source.units(position)]


KINDS = pytest.mark.parametrize("kind", ["jsonl", "parquet", "hub"])


@KINDS
def test_all_rows_in_order(source, kind):
    assert texts(source(kind)) == [row["text"] for row in ROWS]


@KINDS
def test_filter_by_a_value_or_a_list_of_a_nested_column(source, kind):
    one = source(kind, filter={"meta.language": "C++"})
    assert texts(one) == [row["text"] for row in ROWS if row["meta"]["language"] == "C++"]
    both = source(kind, filter={"meta.repo": ["r0", "r2"], "meta.language": "Python"})
    assert texts(both) == [f"row {n}" for n in range(12) if n % 3 != 1 and n % 2 == 0]


def test_true_is_not_one_in_a_filter(source, files):
    rows = [{"text": str(value), "g": value} for value in (True, False, 1, 0, 1.0, "1", None)]
    (files / "part0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for wanted, kept in (
        (True, ["True"]),
        (1, ["1", "1.0"]),
        ([False, "1"], ["False", "1"]),
        ([0, True], ["True", "0"]),
    ):
        assert texts(source("jsonl", files=[str(files / "part0.jsonl")], filter={"g": wanted})) == kept


@KINDS
def test_parts_share_no_value_and_leave_none_out(source, kind):
    ends = [0, 0.1, 0.35, 0.7, 1]
    for column, values in (("meta.repo", 3), ("id", 12)):
        parts = [texts(source(kind, part={"by": column, "range": pair})) for pair in pairwise(ends)]
        assert sorted(text for part in parts for text in part) == sorted(row["text"] for row in ROWS)
        found = [{row["meta"]["repo"] if values == 3 else row["id"] for row in ROWS if row["text"] in p} for p in parts]
        assert sum(map(len, found)) == values, "all rows of a value are in one part"
        assert sum(map(bool, found)) > 1
    assert texts(source(kind, part={"by": "id", "range": [0, 0.35]}, shuffle_files=True, seed=5)) != []


def test_a_part_has_as_many_values_as_its_range_says():
    """The hash is uniform, and is this one for good: another would mix what older runs held out with what they read."""
    part = Part(by="id", range=(0.2, 0.3))
    assert 0.09 < sum(part.holds(f"repository {n}") for n in range(10_000)) / 10_000 < 0.11
    assert [n for n in range(100) if part.holds(n)] == [20, 33, 37, 40, 47, 61, 84, 87, 89, 91]


@KINDS
def test_nested_column_of_text(source, kind):
    assert texts(source(kind, column="meta.repo")) == [row["meta"]["repo"] for row in ROWS]


@KINDS
def test_files_are_shuffled_by_the_seed_and_rows_are_not(source, kind):
    orders = set()
    for seed in range(8):
        found = texts(source(kind, seed=seed, shuffle_files=True))
        assert found == texts(source(kind, seed=seed, shuffle_files=True))
        parts = [tuple(found[start : start + 4]) for start in (0, 4, 8)]
        assert sorted(parts) == sorted(tuple(f"row {4 * p + n}" for n in range(4)) for p in range(3))
        orders.add(tuple(found))
    assert len(orders) > 2


@KINDS
@pytest.mark.parametrize(
    "options", [{}, {"filter": {"meta.language": "C++"}}, {"group_by": "meta.repo"}, {"part": LESS}]
)
def test_reading_goes_on_at_every_position(source, kind, options):
    opened = source(kind, **options)
    units = list(opened.units(Position()))
    assert len(units) >= 6
    for number, (_, position) in enumerate(units, start=1):
        again = source(kind, **options)
        assert [unit for unit, _ in again.units(position)] == [unit for unit, _ in units[number:]]


@KINDS
def test_a_group_is_one_document(source, kind):
    joined = lambda *numbers: GROUP_JOINT.join(f"row {n}" for n in numbers)  # noqa: E731
    assert texts(source(kind, group_by="meta.repo")) == [
        *(joined(0, 3), joined(1), joined(2)),  # the first file
        *(joined(4, 7), joined(5), joined(6)),
        *(joined(8, 11), joined(9), joined(10)),
    ]
    windowed = source(kind, group_by="meta.language", group_window=3)
    assert texts(windowed)[:3] == [joined(0, 2), joined(1), joined(3)]


@KINDS
@pytest.mark.parametrize("options", [{"group_by": "meta"}, {"part": {"by": "meta", "range": [0, 1]}}])
def test_what_is_no_value_tells_no_rows_apart(source, kind, options):
    with pytest.raises(UserError, match="column 'meta' is of type dict, and cannot tell rows apart"):
        texts(source(kind, **options))


def test_documents_without_a_group_stay_alone(source, files):
    rows = [{"text": "a", "g": None}, {"text": "b", "g": None}, {"text": "c", "g": 1}, {"text": "d", "g": 1}]
    (files / "part0.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    opened = source("jsonl", files=[str(files / "part0.jsonl")], group_by="g")
    assert texts(opened) == ["a", "b", f"c{GROUP_JOINT}d"]


@pytest.mark.parametrize("recipe", ["mamba2-2.7b", "mamba2-2.7b-baseline"])
def test_shipped_recipes_read_the_columns_that_public_sets_have(recipe, tokenizer, tmp_path):
    repositories = {f"r{number}" for number in range(40)}
    code = {"id": "1", "source": "stackv2", "added": "2025", "created": "2024"}
    kinds = {"a.cpp": "C++", "b.cpp": "C++", "c.py": "Python", "d.js": "JavaScript"}
    web = {"id": "1", "url": "u", "language": "en", "token_count": 1, "score": 3.1, "int_score": 3}
    sets = {
        "HuggingFaceFW/fineweb-edu": [web | {"text": "page"}],
        "common-pile/stackv2_edu_filtered": [
            code | {"text": f"{repo} {path}", "metadata": {"repo_name": repo, "path": path, "language": language}}
            for path, language in kinds.items()
            for repo in sorted(repositories)
        ],
        "cerebras/SlimPajama-627B": [
            {"text": name, "meta": {"redpajama_set_name": f"RedPajama{name}"}} for name in ("ArXiv", "Book", "Github")
        ],
        "Yukang/LongAlpaca-12k": [
            {"file": "f", "input": "", "instruction": "why", "output": output} for output in ("so", None)
        ],
    }
    read = {}
    for _, fields in chain.from_iterable(sources_of(stage.data) for stage in load_recipe(recipe).stages):
        if isinstance(fields, Rows):
            path = tmp_path / f"{len(read)}.parquet"
            pq.write_table(pa.Table.from_pylist(sets[fields.hub.dataset]), path)
            hub = HubSet(dataset="parquet", data_files=(str(path),), split=fields.hub.split)
            opened = open_source(fields.model_copy(update={"hub": hub}), tokenizer, seed=0)
            read[name_of(fields)] = [unit for unit, _ in opened.units(Position())]
    assert read.pop("Yukang/LongAlpaca-12k") == [("why", "so"), None]
    found = {name: [text for text, _ in units] for name, units in read.items()}
    assert (found.pop("FineWeb-Edu"), found.pop("arXiv"), found.pop("books")) == (["page"], ["ArXiv"], ["Book"])
    first = {text.split()[0] for text in found.pop("StackV2")}
    cpp, python = found.pop("C++ repositories"), found.pop("Python repositories")
    second = {text.split()[0] for text in cpp}
    assert first
    assert second == repositories - first, "each stage has repositories of its own"
    assert sorted(cpp) == sorted(f"{repo} a.cpp{GROUP_JOINT}{repo} b.cpp" for repo in second)
    assert sorted(python) == sorted(f"{repo} c.py" for repo in second)
    assert not found


@KINDS
@pytest.mark.parametrize(
    ("options", "missing"),
    [
        ({"column": "body"}, "body"),
        ({"group_by": "repository"}, "repository"),
        ({"filter": {"meta.set": "a"}}, "meta.set"),
        ({"part": {"by": "meta.set", "range": [0, 1]}}, "meta.set"),
        ({"column": "text.inner"}, "text.inner"),
    ],
    ids=["column", "group", "filter", "part", "into-a-text"],
)
def test_missing_column_lists_those_found(source, kind, options, missing):
    with pytest.raises(UserError, match=f"no column '{missing}' \\(columns found: .*text") as error:
        source(kind, **options)
    assert "\n" not in str(error.value)
    if missing == "meta.set":
        assert "meta.language" in str(error.value)


@KINDS
def test_empty_set(source, files, kind):
    for part in range(3):
        (files / f"part{part}.jsonl").write_text("\n")
        pq.write_table(pa.Table.from_pylist(ROWS).slice(0, 0), files / f"part{part}.parquet")
    hub = {"dataset": "json", "data_files": [str(files / "part0.jsonl")]}
    with pytest.raises(UserError, match="there is no row in it"):
        source(kind, **({"hub": hub} if kind == "hub" else {}))


@pytest.mark.parametrize("suffix", ["gz", "zst"])
def test_compressed_files_of_a_hub_set(source, files, suffix):
    """As StackV2-edu's and SlimPajama's are."""
    text = (files / "part0.jsonl").read_bytes()
    path = files / f"part0.jsonl.{suffix}"
    path.write_bytes(gzip.compress(text) if suffix == "gz" else zstandard.compress(text))
    opened = source("hub", hub={"dataset": "json", "data_files": [str(path)]}, filter={"meta.language": "C++"})
    assert texts(opened) == ["row 1", "row 3"]


@pytest.mark.parametrize(
    ("hub", "message"),
    [
        ({"split": "test"}, r"data set parquet: Bad split: test. Available splits: \['train'\]"),
        ({"data_files": ["/nowhere/*.parquet"]}, "data set parquet: .*all the data_files are invalid"),
        ({"dataset": "nobody/nothing", "data_files": None}, "data set nobody/nothing: .*; or name local copies"),
    ],
    ids=["split", "files", "offline"],
)
def test_hub_set_that_is_not_there(source, files, hub, message):
    given = {"dataset": "parquet", "data_files": [str(files / "part0.parquet")]} | hub
    with pytest.raises(UserError, match=message) as error:
        source("hub", hub=given)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("cause", "message"),
    [
        (GatedRepoError, "data set me/set: the Hub repository is gated: accept its terms on its page, then run `hf"),
        (RepositoryNotFoundError, "data set me/set: there is no such Hub repository"),
        (ConnectionError, "data set me/set: the Hub cannot be reached"),
    ],
)
def test_gated_missing_or_unreachable_set_says_what_to_do(source, monkeypatch, cause, message):
    """`datasets` wraps what `huggingface_hub` raises in an error of its own."""

    def refuse(*args, **kwargs):
        reason = cause("no") if cause is ConnectionError else http_error(cause)
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'me/set' is not there") from reason

    monkeypatch.setattr(datasets, "load_dataset_builder", refuse)
    with pytest.raises(Unavailable, match=message) as error:
        source("hub", hub={"dataset": "me/set"})
    assert "or name local copies as `files`" in str(error.value)


def test_hub_arguments_reach_datasets(source, monkeypatch):
    def record(*args, **kwargs):
        calls.append((args, kwargs))
        raise ConnectionError

    calls = []
    monkeypatch.setattr(datasets, "load_dataset_builder", record)
    hub = {"dataset": "me/set", "config": "small", "split": "dev", "revision": "v2", "data_files": ["a*.parquet"]}
    with pytest.raises(Unavailable):
        source("hub", hub=hub)
    options = {"revision": "v2", "data_files": ["a*.parquet"]}
    assert calls == [(("me/set", "small"), options)]


def test_files_of_this_machine_have_no_commit(source):
    assert source("hub").files.revision is None


def test_the_commit_of_a_hub_set_is_recorded_and_gone_on_with(
    recipe_dict, write_recipe, files, tokenizer, tmp_path, monkeypatch
):
    """A set of this machine stands for one of the Hub, of which `hash` is the commit (`datasets` looks it up)."""
    commit = "c0ffee" + 34 * "0"
    asked, build = [], datasets.load_dataset_builder

    def hub(name, config, revision, data_files):
        asked.append(revision)
        builder = build("parquet", data_files=[str(files / "part0.parquet")])
        builder.hash = revision or commit
        return builder

    monkeypatch.setattr(datasets, "load_dataset_builder", hub)
    data = {"kind": "text", "hub": {"dataset": "me/set"}}
    sizes = {"sequence_length": 4, "batch_tokens": 4, "tokens": 4}
    recipe_dict["stages"] = [recipe_dict["stages"][0] | sizes | {"data": data}]
    stage = load_recipe(write_recipe(recipe_dict)).stages[0]
    assert prepare(stage, tokenizer, tmp_path / "data")["sources"][0]["revision"] == commit
    fields = stage.data
    stream = SequenceStream(fields, tokenizer, length=8, seed=0)
    assert stream.revision == commit
    assert SequenceStream(fields, tokenizer, length=8, seed=0, state=stream.state()).revision == commit
    assert asked == [None, None, commit]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("deep.jsonl", b'{"text": ' + b"[" * 100_000, "deep.jsonl:1: not valid JSON"),
        ("latin.jsonl", b'{"text": "caf\xe9"}', "latin.jsonl:1: not UTF-8 text"),
        ("latin.parquet", pa.table({"text": pa.array([b"caf\xe9"]).view(pa.string())}), "is not UTF-8 text"),
        ("broken.parquet", b"PAR1", "not a readable parquet file"),
    ],
    ids=["deep", "jsonl", "parquet", "no-parquet"],
)
@pytest.mark.parametrize("kind", ["text", "instruction"])
def test_damaged_files_are_one_line(recipe_dict, write_recipe, tokenizer, tmp_path, kind, name, content, message):
    path = tmp_path / name
    path.write_bytes(content) if isinstance(content, bytes) else pq.write_table(content, path)
    columns = {"prompt_column": "text", "answer_column": "text"} if kind == "instruction" else {}
    data = {"kind": kind, "files": [str(path)]} | columns
    recipe_dict["stages"] = [recipe_dict["stages"][0] | {"data": data}]
    with pytest.raises(UserError, match=message) as error:
        list(open_source(load_recipe(write_recipe(recipe_dict)).stages[0].data, tokenizer, seed=0).units(Position()))
    assert "\n" not in str(error.value)


def test_lone_surrogates_in_instructions(recipe_dict, write_recipe, tokenizer, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"instruction": "a\\ud800", "output": "b"}\n')
    recipe_dict["stages"] = [recipe_dict["stages"][0] | {"data": {"kind": "instruction", "files": ["a.jsonl"]}}]
    opened = open_source(load_recipe(write_recipe(recipe_dict)).stages[0].data, tokenizer, seed=0)
    (unit, _), *_ = opened.units(Position())
    assert unit == ("a\ufffd", "b")
    assert opened.encode([unit])[0].learn.sum() >= 1


@pytest.mark.parametrize("learn", ["answer", "all"])
@pytest.mark.parametrize("task", ["passkey", "niah_multikey_2", "niah_multivalue", "niah_multiquery", "variables"])
def test_synthetic_examples_are_packed_whole_and_scored(recipe_dict, write_recipe, tokenizer, monkeypatch, task, learn):
    monkeypatch.setattr(packing, "BATCH_UNITS", 2)
    data = {"kind": "synthetic", "task": task, "length": 400, "seed": 5, "learn": learn}
    recipe_dict["stages"] = [
        recipe_dict["stages"][0] | {"data": data, "sequence_length": 512, "batch_tokens": 512, "tokens": 512}
    ]
    stream = SequenceStream(load_recipe(write_recipe(recipe_dict)).stages[0].data, tokenizer, length=512, seed=0)
    for example in generate(task, tokenizer=tokenizer, length=400, count=3, seed=5):
        sequence = stream.take()
        size = example.length + 1
        assert tokenizer.decode(sequence.ids[: size - 1]) == example.prompt + example.completion
        assert sequence.ids[size - 1 :].tolist() == [tokenizer.eos_token_id] * (513 - size)
        assert not sequence.learn[size:].any()
        if learn == "all":
            assert sequence.learn[:size].all()
        else:
            answer = tokenizer.decode(sequence.ids[:-1][sequence.learn[:-1]], skip_special_tokens=True)
            assert score(example, answer) == 1
            assert sequence.learn.sum() == example.meta["completion_tokens"] + 1
    assert stream.counts["examples"] in (3, 4)


def test_a_set_that_changed_meanwhile_is_not_gone_on_with(source, files, tokenizer):
    fields = source("hub").fields
    state = SequenceStream(fields, tokenizer, length=8, seed=0).state()
    SequenceStream(fields, tokenizer, length=8, seed=0, state=state)
    fewer = source("hub", hub={"dataset": "parquet", "data_files": [str(files / "part0.parquet")]}).fields
    with pytest.raises(UserError, match=r"the set has changed .*: 1 files where there were 3 \(choose another"):
        SequenceStream(fewer, tokenizer, length=8, seed=0, state=state)


def test_text_and_task_of_any_length_reach_the_end(source, tokenizer):
    """Another sequence length cuts the same tokens elsewhere."""
    whole = []
    for length in (1, 7, 32):
        stream = SequenceStream(source("hub").fields, tokenizer, length=length, seed=0)
        taken = [token for sequence in iter(stream.take, None) for token in sequence.ids.tolist()]
        whole.append(taken)
        assert len(taken) + stream.rest == len(whole[0])
        assert taken == whole[0][: len(taken)]
    expected = [[*ids, tokenizer.eos_token_id] for ids in tokenizer([row["text"] for row in ROWS])["input_ids"]]
    assert whole[0] == list(chain.from_iterable(expected))
