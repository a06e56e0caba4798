"""The demo's data are what this code makes of `kjv.txt`; run the file to write them again."""

import json
import re

import pytest

from palimpsa_surgery.surgery.assets import asset_path

BOOKS = {
    "Ge": "Genesis",
    "Exo": "Exodus",
    "Ruth": "Ruth",
    "Job": "Job",
    "Psa": "Psalms",
    "Eccl": "Ecclesiastes",
    "Isa": "Isaiah",
    "Jonah": "Jonah",
    "Mat": "Matthew",
    "John": "John",
}
PER_BOOK = 6
PROVERBS = 100
CHAPTERS = 80


def spread(choices: list, count: int) -> list:
    """Take `count` items, evenly spread."""
    return [choices[i * len(choices) // count] for i in range(count)]


def interleave(items: list) -> list:
    """Mix the order, so that the end, which is held out, is like the rest."""
    step = 37
    assert len(items) % step, "a step that shares a factor with the number of items would repeat some"
    return [items[i * step % len(items)] for i in range(len(items))]


def verses_by(pattern: str) -> dict[str, list[str]]:
    """Verses grouped by the part of their reference that `pattern` matches."""
    groups: dict[str, list[str]] = {}
    for line in asset_path("kjv.txt").read_text(encoding="utf-8").splitlines():
        reference, verse = line.split(" ", 1)
        groups.setdefault(re.match(pattern, reference)[0], []).append(verse.strip())
    return groups


def to_jsonl(rows: list[dict]) -> str:
    return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def make_chapters() -> str:
    """Whole chapters as running prose: the tiny checkpoint was trained on numbered verses."""
    chapters = [" ".join(verses) for verses in verses_by(r"\d?[A-Za-z]+\d+").values()]
    return to_jsonl([{"text": chapter} for chapter in interleave(spread(chapters, CHAPTERS))])


def make_instructions() -> str:
    """Short questions: finish a proverb, or name the book of a verse."""
    verses = verses_by(r"\d?[A-Za-z]+")
    couplets = [verse.partition(": ") for verse in verses["Prv"] if verse.count(": ") == 1 and len(verse) < 110]
    pairs = [(f"Finish this proverb: {first}:", second) for first, _, second in spread(couplets, PROVERBS)]
    for book, name in BOOKS.items():
        short = [verse for verse in verses[book] if 40 < len(verse) < 80]
        pairs += [(f"Which book says this? {verse}", f"The book of {name}.") for verse in spread(short, PER_BOOK)]
    return to_jsonl([{"instruction": question, "output": answer} for question, answer in interleave(pairs)])


MADE = {"demo-chapters.jsonl": make_chapters, "demo-instructions.jsonl": make_instructions}


@pytest.mark.parametrize("name", MADE)
def test_shipped_data_are_what_the_code_makes(name):
    assert asset_path(name).read_text(encoding="utf-8") == MADE[name]()


def test_every_example_comes_once():
    chapters, instructions = (asset_path(name).read_text().splitlines() for name in MADE)
    assert len(set(chapters)) == CHAPTERS
    assert len(set(instructions)) == PROVERBS + PER_BOOK * len(BOOKS)


if __name__ == "__main__":
    for name, make in MADE.items():
        path = asset_path("kjv.txt").parent / name
        path.write_text(make(), encoding="utf-8")
        print(path)
