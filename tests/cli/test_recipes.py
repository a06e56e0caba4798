"""The verb `recipes`."""

import yaml

from palimpsa_surgery.stages.recipe import load_recipe, shipped_recipes


def test_list_names_and_describes_all_in_80_columns(cli, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    outcome = cli("recipes")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert max(map(len, outcome.stdout.splitlines())) <= 80
    words = outcome.stdout.split()
    for name, path in shipped_recipes().items():
        assert name in words
        description = yaml.safe_load(path.read_text())["description"]
        assert description.split()[-1] in words


def test_show_prints_a_recipe_as_it_ships(cli, tmp_path):
    outcome = cli("recipes", "show", "mamba2-2.7b")
    assert (outcome.code, outcome.stderr) == (0, "")
    assert outcome.stdout == shipped_recipes()["mamba2-2.7b"].read_text()
    (tmp_path / "mine.yaml").write_text(outcome.stdout)
    assert load_recipe(tmp_path / "mine.yaml") == load_recipe("mamba2-2.7b")


def test_mistakes_are_one_line(cli):
    assert cli("recipes", "show", "mamba2-27b").error.endswith("(did you mean mamba2-2.7b?)")
    assert cli("recipes", "show").error == "name one of: demo, mamba2-2.7b, mamba2-2.7b-baseline"
    assert "'list' is not one of 'show'" in cli("recipes", "list").error
