"""Text tasks: solved by reading them, sized in tokens, drawn the same everywhere, refused when impossible."""

import hashlib
import itertools
import json
import re

import numpy as np
import pytest

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.stages.synthetic import TEXT_TASKS, generate, score, string_match_all, string_match_part
from palimpsa_surgery.stages.synthetic.fitting import SLACK, fit
from palimpsa_surgery.stages.synthetic.haystack import Essay, EssayHay, NoiseHay, bury
from palimpsa_surgery.stages.synthetic.scoring import character_accuracy
from palimpsa_surgery.stages.synthetic.words import ADJECTIVES, NOUNS

CASES = {
    **{name: (name, {}) for name in TEXT_TASKS},
    "passkey-essay": ("passkey", {"haystack": "essay", "digits": 9}),
    "variables-chains": ("variables", {"chains": 3, "hops": 2}),
    "variables-one": ("variables", {"hops": 0, "chains": 2}),
    "variables-essay": ("variables", {"haystack": "essay"}),
    "needles-all": ("needles", {"keys": 4, "values": 2, "queries": 3, "haystack": "needle"}),
    "needles-words": ("needles", {"keys": 3, "key_kind": "uuids", "value_kind": "words", "haystack": "essay"}),
    "needles-numbers": ("needles", {"keys": 3, "key_kind": "numbers", "haystack": "needle"}),
}
LARGEST_UNIT = 80  # tokens of a needle of two uuids and its newline, with the shipped tokenizer

cases = pytest.mark.parametrize(("task", "options"), CASES.values(), ids=CASES.keys())


@pytest.fixture
def make(tokenizer):
    def examples(task, count=4, length=700, seed=3, **options):
        return list(generate(task, tokenizer=tokenizer, length=length, count=count, seed=seed, **options))

    return examples


def oracle(prompt: str) -> str:
    """Answer a prompt by reading it, with no knowledge of how it was made."""
    if copied := re.fullmatch(r"Copy: ([a-z ]+)\nCopy:", prompt):
        return copied[1]
    if "What is the pass key?" in prompt:
        return re.search(r"The pass key is (\d+)\. Remember it\.", prompt)[1]
    if asked := re.search(r"Find all variables that are assigned the value (\d+)", prompt):
        known = {}
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", prompt):
            known[name] = known.get(source, source)
        return " ".join(name for name, value in known.items() if value == asked[1])
    body, question = prompt.rsplit("\nWhat ", 1)
    queries = re.split(r", and |, ", re.search(r"special magic \w+ for (.*?) mentioned", question)[1])
    needles = re.findall(r"One of the special magic \w+ for (\S+) is: (\S+)\.", body)
    return ", ".join(value for key, value in needles if key in queries)


def other(text: str) -> str:
    """A wrong answer of the same form: every letter and digit replaced by the next one."""
    cycles = ("0123456789", "abcdefghijklmnopqrstuvwxyz", "ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    return text.translate({ord(a): b for cycle in cycles for a, b in zip(cycle, cycle[1:] + cycle[0], strict=True)})


@cases
def test_oracle_solves_every_example(make, task, options):
    for example in make(task, count=6, **options):
        answer = oracle(example.prompt)
        assert score(example, answer) == 1
        assert score(example, example.completion) == 1
        assert sorted(re.findall(r"[\w-]+", answer)) == sorted(" ".join(example.answers).split()) or task == "copying"
        assert score(example, other(answer)) == 0
        assert score(example, "") == 0


@cases
def test_length_is_met_and_never_exceeded(make, tokenizer, task, options):
    unit = LARGEST_UNIT if "needle" in str(options) or task in ("niah_multikey_2", "niah_multikey_3") else SLACK
    for length in (600, 1203):
        for example in make(task, count=2, length=length, **options):
            tokens = tokenizer(example.prompt + example.completion, add_special_tokens=False)["input_ids"]
            assert len(tokens) == example.length
            assert length - unit <= example.length <= length
            answer = tokenizer(example.completion, add_special_tokens=False)["input_ids"]
            assert tokens[-len(answer) :] == answer
            assert example.meta["completion_tokens"] == len(answer)
            assert example.prompt == example.prompt.rstrip()
            json.dumps(example.meta)


@cases
def test_seed_and_number_decide(make, task, options):
    examples = make(task, **options)
    assert examples == make(task, **options)
    assert examples[2:] == make(task, count=2, start=2, **options)
    assert len({example.prompt for example in examples + make(task, seed=4, **options)}) == 8


def test_examples_are_the_same_on_every_platform(make):
    """Changes on purpose only: recipes promise the same data for the same seed."""
    text = "".join(f"{e.prompt}{e.completion}\n" for task in TEXT_TASKS for e in make(task, count=2, length=600))
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "351239b6bd8e9ce4090b6cd0d1a965a4b696bd368a1bcb509d0f258966234738"
    )


@pytest.mark.parametrize("haystack", ["noise", "essay", "needle"])
def test_depths_cover_the_text_and_are_where_they_say(make, haystack):
    examples = make("needles", count=60, length=500, haystack=haystack)
    depths = [example.meta["depths"][0] for example in examples]
    assert min(depths) < 0.1
    assert max(depths) > 0.9
    assert all(np.histogram(depths, bins=4, range=(0, 1))[0] >= 6)
    for example, depth in zip(examples, depths, strict=True):
        context = example.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
        needle = f"One of the special magic numbers for {example.meta['keys'][0]} is: {example.answers[0]}."
        before, after = context.split(needle)
        assert len(before) / len(before + after) == pytest.approx(depth, abs=0.05)


@pytest.mark.parametrize("depth", [0, 0.5, 1.0])
@pytest.mark.parametrize("haystack", ["noise", "essay"])
def test_depth_can_be_fixed(make, haystack, depth):
    for example in make("passkey", haystack=haystack, depth=depth):
        assert example.meta["depths"] == [pytest.approx(depth, abs=0.07)]
        context = example.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
        assert context.startswith("The pass key is") == (depth == 0)
        assert context.endswith("is the pass key.") == (depth == 1)


def test_lengths_are_drawn_between_bounds(make):
    lengths = [example.length for example in make("passkey", count=40, length=900, min_length=300)]
    assert 300 - SLACK <= min(lengths) < 400
    assert 800 < max(lengths) <= 900


def test_assignments_stand_in_the_order_of_their_chain(make):
    for example in make("variables", count=10, chains=3):
        seen = set()
        for name, source in re.findall(r"VAR ([A-Z]+) = (?:VAR )?(\w+)", example.prompt):
            assert source.isdigit() or source in seen
            seen.add(name)
        assert len(seen) == 15
        assert example.meta["depths"] == sorted(example.meta["depths"])


@pytest.mark.parametrize("kind", ["words", "numbers", "uuids"])
def test_distractors_never_have_a_key_or_value_that_is_asked_for(make, kind):
    form = {"words": r"[a-z]+-[a-z]+", "numbers": r"[1-9]\d{6}", "uuids": r"[0-9a-f-]{14}4[0-9a-f-]{21}"}[kind]
    options = {"haystack": "needle", "key_kind": kind, "value_kind": kind, "keys": 2, "values": 2}
    for example in make("needles", count=4, length=3000, **options):
        (asked,) = example.meta["keys"]
        needles = re.findall(r"magic \w+ for (\S+) is: (\S+)\.", example.prompt)
        assert len(needles) > 20
        assert all(re.fullmatch(form, word) for needle in needles for word in needle)
        assert sorted(value for key, value in needles if key == asked) == sorted(example.answers)
        rest = [word for key, value in needles if key != asked for word in (key, value)]
        assert not set(rest) & {asked, *example.answers}


def test_words_are_never_part_of_other_words():
    for words in (ADJECTIVES, NOUNS):
        assert len(set(words)) == len(words) > 100
    assert not [(a, b) for a, b in itertools.permutations(ADJECTIVES, 2) if b.endswith(a)]
    assert not [(a, b) for a, b in itertools.permutations(NOUNS, 2) if b.startswith(a)]


def test_ruler_forms_have_as_many_needles_as_they_say(make):
    forms = {"niah_single_1": 1, "niah_single_2": 1, "niah_multikey_1": 4, "niah_multivalue": 4, "niah_multiquery": 4}
    for task, needles in forms.items():
        (example,) = make(task, count=1)
        assert example.prompt.count("One of the special magic numbers for") == needles
        assert len(example.answers) == (4 if task in ("niah_multivalue", "niah_multiquery") else 1)


def test_essay_is_the_users_own_and_starts_anew_at_its_end(make, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Alpha beta gamma.  Delta\nepsilon. Zeta eta")
    (example,) = make("passkey", count=1, length=200, haystack="essay", files=[str(path)])
    context = example.prompt.split("\n", 1)[1].rsplit("\n", 1)[0]
    needle = re.compile(r" ?The pass key is .*? is the pass key\.")
    words = needle.sub("", context).split()
    assert words[: words.index("Alpha")] in (["Delta", "epsilon.", "Zeta", "eta"], ["Zeta", "eta"], [])
    assert "epsilon. Zeta eta Alpha beta gamma. Delta" in " ".join(words)
    before = context[: needle.search(context).start()]
    assert before == "" or before.endswith(".")


def test_essay_words_and_sentence_ends(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("a b. c 'd?' e")
    essay = Essay([path])
    assert essay.words(3, 12) == "'d?' e a b. c 'd?' e a b."
    assert [essay.sentence_end(place) for place in (0, 1.5, 2.9, 3.2, 5, 6.9, 8.8)] == [-1, 2, 2, 4, 4, 7, 9]
    context, depths = bury(EssayHay(essay, 2), 8, [(0.9, "LATE"), (0.0, "EARLY"), (0.3, "MID")])
    assert context == "EARLY c 'd?' MID e a b. c 'd?' LATE e"
    assert depths == [0.875, 0.0, 0.25]


def test_noise_is_cut_into_lines():
    context, depths = bury(NoiseHay(), 7, [(0.5, "NEEDLE")])
    sentences = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
    assert context == f"{sentences}\nNEEDLE\nThe grass is green. The sky is blue."
    assert depths == [0.7143]


@pytest.mark.parametrize(
    ("tokens", "calls"),
    [
        (lambda n: 40 + 6 * n, 5),
        (lambda n: 10 + n, 5),
        (lambda n: 30 + 70 * n, 5),
        (lambda n: 20 + 2 * n + n * n // 300, 25),
    ],
    ids=["sentences", "words", "needles", "curved"],
)
def test_fit_is_maximal_and_frugal(tokens, calls):
    for length in (100, 1000, 32_768):
        asked = []
        units = fit(lambda n, asked=asked: asked.append(n) or tokens(n), length)
        assert tokens(units) <= length
        assert tokens(units + 1) > length or length - tokens(units) <= SLACK
        assert len(asked) <= calls
        assert len(set(asked)) == len(asked)
    assert fit(tokens, tokens(1) - 1) is None


def test_string_matches():
    answers = ("12345", "Red-Apple")
    assert string_match_all("It is 12345, and red-apple.", answers) == 1
    assert string_match_all("It is 12345.", answers) == 0.5
    assert string_match_all("It is 123456 and red-apples", answers) == 0
    assert string_match_part("It is 12345.", answers) == 1
    assert string_match_part("It is 1234.", answers) == 0


def test_character_accuracy():
    assert character_accuracy(" a b c d", ("a b c d",)) == 1
    assert character_accuracy("abxd and so on", ("a b c d",)) == 0.75
    assert character_accuracy("ab", ("a b c d",)) == 0.5


ERRORS = {
    "task": (dict(task="niah"), r"task 'niah' is not one of those made of text \(passkey, variables, "),
    "token-task": (dict(task="mqar"), "task 'mqar' is not one .*it is made of token ids, see generate_tokens"),
    "option": (dict(hops=3), r"task 'passkey' has no option 'hops' \(it has depth, digits, files, haystack\)"),
    "no-options": (dict(task="copying", hops=3), r"task 'copying' has no option 'hops' \(it has none\)"),
    "length": (dict(length=20), "length is too short for passkey: got 20 tokens, example 0 needs [0-9]{2}$"),
    "length-float": (dict(length=100.0), "length must be an integer of 1 or more, got 100.0"),
    "count": (dict(count=0), "count must be an integer of 1 or more, got 0"),
    "count-bool": (dict(count=True), "count must be an integer of 1 or more, got True"),
    "seed": (dict(seed=-1), "seed must be an integer of 0 or more, got -1"),
    "start": (dict(start="a"), "start must be an integer of 0 or more, got 'a'"),
    "min-length": (dict(min_length=900), "min_length must be an integer from 1 to 700, got 900"),
    "min-length-short": (dict(min_length=1, length=30), "min_length is too short for passkey: got [0-9]+ tokens"),
    "digits": (dict(digits=0), "digits must be an integer from 1 to 18, got 0"),
    "depth": (dict(depth=1.5), "depth must be a number from 0 to 1, got 1.5"),
    "depth-nan": (dict(depth=float("nan")), "depth must be a number from 0 to 1, got nan"),
    "haystack": (dict(haystack="needle"), "haystack must be one of noise, essay, got 'needle'"),
    "haystack-type": (dict(haystack=None), "haystack must be one of noise, essay, got None"),
    "files-noise": (dict(files=["a.txt"]), "files are read by the haystack essay only, got 1 with 'noise'"),
    "files-text": (dict(haystack="essay", files="a.txt"), "files must be a list of paths, got 'a.txt'"),
    "files-missing": (dict(haystack="essay", files=["no.txt"]), "text file no.txt does not exist"),
    "hops": (dict(task="variables", hops=-1), "hops must be an integer from 0 to 100, got -1"),
    "chains": (dict(task="variables", chains=0), "chains must be an integer from 1 to 100, got 0"),
    "keys": (dict(task="needles", keys=0), "keys must be an integer from 1 to 1000, got 0"),
    "values": (dict(task="needles", values=None), "values must be an integer from 1 to 1000, got None"),
    "queries": (dict(task="needles", queries=0), "queries must be an integer from 1 to 1000, got 0"),
    "queries-keys": (dict(task="needles", queries=3, keys=2), "queries must not be more than keys, got 3 and 2"),
    "key-kind": (dict(task="needles", key_kind="names"), "key_kind must be one of words, numbers, uuids, got 'names'"),
    "value-kind": (dict(task="needles", value_kind=1), "value_kind must be one of words, numbers, uuids, got 1"),
    "words": (
        dict(task="needles", keys=100, values=200, value_kind="words"),
        "keys and values must not need more than [0-9]+ words, got 20100",
    ),
    "depth-many": (dict(task="needles", values=3, depth=0.5), r"depth is for one needle, got 3 \(keys x values\)"),
}


@pytest.mark.parametrize(("arguments", "message"), ERRORS.values(), ids=ERRORS.keys())
def test_bad_arguments_are_refused_before_the_first_example(tokenizer, arguments, message):
    valid = {"task": "passkey", "length": 700, "count": 2, "seed": 0}
    with pytest.raises(UserError, match=message) as error:
        generate(**(valid | arguments), tokenizer=tokenizer)
    assert "\n" not in str(error.value)
