import json
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery import text as text_module
from palimpsa_surgery.surgery.text import check_text_files, iter_documents, iter_token_blocks

# Line ends of both kinds, tabs, runs of spaces, letters outside ASCII and the BMP: none may be lost.
SAMPLE = "One two  three.\r\n\tfour\n\n五 six — 🙂 seven;\n" * 40


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint):
    return PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"), eos_token="<|endoftext|>")


def write(folder, kind, documents, column="text"):
    """One file of each kind with these documents; a .txt holds exactly one."""
    path = folder / f"sample.{kind}"
    if kind == "txt":
        (document,) = documents
        path.write_bytes(document.encode())
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, column: document}) + "\n" for document in documents))
    else:
        pq.write_table(pa.table({"id": [1] * len(documents), column: documents}), path, row_group_size=2)
    return path


def tokens(files, tokenizer, **options):
    options = {"sequence_length": 64, "max_tokens": None, **options}
    return [token for block in iter_token_blocks(files, tokenizer, **options) for token in block]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_every_kind_gives_the_same_text_and_tokens(kind, tmp_path, tokenizer):
    path = write(tmp_path, kind, [SAMPLE])
    assert list(iter_documents([path])) == [SAMPLE]
    assert tokens([path], tokenizer) == tokenizer(SAMPLE)["input_ids"]


@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet"])
def test_long_text_cut_into_pieces_gives_the_tokens_of_the_whole(kind, tmp_path, tokenizer, kjv, monkeypatch):
    text = kjv.read_text()[:60_000]
    whole = tokenizer(text)["input_ids"]
    path = write(tmp_path, kind, [text])
    monkeypatch.setattr(text_module, "PIECE", 500)
    monkeypatch.setattr(text_module, "_READ", 333)
    assert len(list(text_module.split_pieces([text]))) > 100
    assert tokens([path], tokenizer) == whole


@pytest.mark.parametrize("text", ["一二三四五六七八九十" * 50, "a" * 333, " " * 99 + "x", "\n \n" * 70])
def test_pieces_are_bounded_and_lose_nothing(text, monkeypatch):
    monkeypatch.setattr(text_module, "PIECE", 32)
    pieces = list(text_module.split_pieces(text[i : i + 7] for i in range(0, len(text), 7)))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 32
    assert pieces == list(text_module.split_pieces([text]))


def test_txt_is_streamed(tmp_path, tokenizer, monkeypatch):
    path = write(tmp_path, "txt", ["word " * 200_000])
    handed_over = []
    original = text_module.split_pieces

    def counting(chunks):
        for piece in original(chunks):
            handed_over.append(len(piece))
            yield piece

    monkeypatch.setattr(text_module, "split_pieces", counting)
    assert len(tokens([path], tokenizer, max_tokens=100)) == 100
    assert len(handed_over) == 1, "a limit on tokens stops the reading"
    assert handed_over[0] <= text_module.PIECE


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_documents_are_separated_by_eos_across_files(kind, tmp_path, tokenizer):
    several = write(tmp_path, kind, ["alpha beta", "", None, "  ", "gamma"])
    single = write(tmp_path, "txt", ["delta epsilon"])
    expected = []
    for document in ("alpha beta", "gamma", "delta epsilon"):
        expected += [tokenizer.eos_token_id, *tokenizer(document)["input_ids"]]
    assert tokens([several, single], tokenizer) == expected[1:]


@pytest.mark.parametrize(
    ("max_tokens", "expected"),
    [
        (None, [8, 8, 4]),
        (20, [8, 8, 4]),
        (100, [8, 8, 4]),
        (18, [8, 8, 2]),
        (17, [8, 8]),
        (16, [8, 8]),
        (5, [5]),
    ],
)
def test_block_lengths(max_tokens, expected, tmp_path, tokenizer):
    path = write(tmp_path, "txt", ["the" + " the" * 19])
    blocks = list(iter_token_blocks([path], tokenizer, sequence_length=8, max_tokens=max_tokens))
    assert [len(block) for block in blocks] == expected


def test_another_column(tmp_path, tokenizer):
    for kind in ("jsonl", "parquet"):
        path = write(tmp_path, kind, [SAMPLE], column="content")
        assert list(iter_documents([path], column="content")) == [SAMPLE]


def test_lone_surrogates_become_replacement_characters(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one \\ud800 two \\ud83d\\ude42 \\u0000 three"}\n')
    assert list(iter_documents([path])) == ["one \ufffd two 🙂 \0 three"]
    assert tokens([path], tokenizer)


def test_byte_order_marks_are_no_text(tmp_path):
    for name, body in (("a.txt", "hello"), ("a.jsonl", '{"text": "hello"}')):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + body.encode())
    assert list(iter_documents([tmp_path / "a.txt", tmp_path / "a.jsonl"])) == ["hello", "hello"]


PARQUET_OF_NUMBERS = pa.table({"text": [1, 2], "other": [3, 4]})

MISTAKES = {
    "missing": ("missing.txt", None, "missing.txt does not exist"),
    "folder": ("folder", None, "folder is a folder"),
    "unknown kind": ("a.docx", b"x", r"unknown kind '.docx' \(known: .txt, .jsonl, .parquet\)"),
    "no suffix": ("notes", b"x", "unknown kind ''"),
    "empty": ("a.txt", b"", "a.txt is empty"),
    "blank": ("a.txt", b" \n\t\n", "a.txt holds no text"),
    "binary": ("a.txt", b"MZ\0\0\1", "binary"),
    "latin-1": ("a.txt", b"caf\xe9 au lait", r"not UTF-8 text \(near byte 3\)"),
    "truncated UTF-8": ("a.txt", "abc 五".encode()[:-1], r"not UTF-8 text \(near byte 4\)"),
    "bad JSON": ("a.jsonl", b'{"text": "a"}\n{"text": ', "a.jsonl:2: not valid JSON"),
    "not an object": ("a.jsonl", b'"text"\n', "a.jsonl:1: expected a JSON object"),
    "deep JSON": ("a.jsonl", b"[" * 100_000, "a.jsonl:1: not valid JSON"),
    "no field": (
        "a.jsonl",
        b'{"id": 1, "body": ""}\n',
        r"a.jsonl:1: no column 'text' \(columns found: id, body\)",
    ),
    "not a string": ("a.jsonl", b'\n{"text": ["a"]}\n', "a.jsonl:2: column 'text' is of type list"),
    "jsonl latin-1": ("a.jsonl", b'{"text": "caf\xe9"}\n', "a.jsonl:1: not UTF-8"),
    "jsonl blank": ("a.jsonl", b'{"text": ""}\n\n', "a.jsonl holds no text in 'text'"),
    "not parquet": ("a.parquet", b"PAR1 not really", "not a readable parquet file"),
    "parquet column": (
        "a.parquet",
        pa.table({"body": ["a"], "id": [1]}),
        r"no column 'text' \(columns found: body, id\)",
    ),
    "parquet type": ("a.parquet", PARQUET_OF_NUMBERS, "row 1: column 'text' is of type int, not a string"),
    "parquet blank": ("a.parquet", pa.table({"text": ["", None, " "]}), "a.parquet holds no text in 'text'"),
    "too short": ("a.txt", b"a", r"not enough text: .*a.txt gave 1 token\(s\)"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_each_mistake_is_one_clear_line(name, tmp_path, tokenizer):
    filename, content, message = MISTAKES[name]
    path = tmp_path / filename
    if filename == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        pq.write_table(content, path)
    with pytest.raises(UserError, match=message) as caught:
        tokens([path], tokenizer)
    assert str(tmp_path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_damage_in_the_middle_of_a_long_file_is_located(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"word " * 100_000 + b"\xff" + b"word " * 10)
    with pytest.raises(UserError, match=r"near byte 500000\)"):
        list(iter_documents([path]))


@pytest.mark.parametrize("name", ["missing", "folder", "unknown kind", "empty"])
def test_mistakes_in_names_are_found_before_anything_is_read(name, tmp_path):
    filename, content, message = MISTAKES[name]
    good = tmp_path / "good.txt"
    good.write_text("fine")
    if content is not None:
        (tmp_path / filename).write_bytes(content)
    elif filename == "folder":
        (tmp_path / filename).mkdir()
    with pytest.raises(UserError, match=message):
        iter_documents([good, tmp_path / filename])
    with pytest.raises(UserError, match="no text files given"):
        check_text_files([])


@pytest.mark.parametrize(("option", "value"), [("sequence_length", 1), ("max_tokens", 1), ("max_tokens", 0)])
def test_lengths_that_make_no_sense_are_refused(option, value, tmp_path, tokenizer):
    path = write(tmp_path, "txt", [SAMPLE])
    with pytest.raises(UserError, match=re.escape(f"at least 2, got {value}") + "|" + f"2 tokens, got {value}"):
        tokens([path], tokenizer, **{option: value})


def test_a_tokenizer_without_eos_joins_no_documents(tmp_path, tiny_checkpoint):
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tiny_checkpoint / "tokenizer.json"))
    assert tokens([write(tmp_path, "jsonl", ["one two"])], tokenizer)
    with pytest.raises(UserError, match="no eos token"):
        tokens([write(tmp_path, "jsonl", ["one two", "three"])], tokenizer)
