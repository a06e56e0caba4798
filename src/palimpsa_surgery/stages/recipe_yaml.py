"""YAML as recipes are written in: plain values, 1e-4 a number, no key twice, and nothing that takes for ever."""

import re
from pathlib import Path
from typing import Any

import yaml

from palimpsa_surgery.errors import UserError

LARGEST_FILE = 1 << 20
LARGEST_RECIPE = 10_000
"""Values that a recipe may hold, those behind aliases counted each time: a few lines can spell billions."""


def read_yaml(path: Path) -> Any:
    """Read a YAML file.

    Raises:
        UserError: it cannot be read, is not YAML, or holds too much.
    """
    try:
        if path.stat().st_size > LARGEST_FILE:
            raise UserError(f"recipe {path} is larger than {LARGEST_FILE:,} bytes")
        return _parse(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"recipe {path} cannot be read: {error}") from None
    except yaml.YAMLError as error:
        raise UserError(f"recipe {path} is not valid YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"recipe {path} is nested too deeply") from None
    except UserError:
        raise
    except (ValueError, LookupError, AttributeError) as error:  # of PyYAML's own, for dates and numbers that are none
        raise UserError(f"recipe {path} holds a value that cannot be read: {error}") from None


def _parse(text: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is not None and _count_values(node, {}) > LARGEST_RECIPE:
            raise UserError(
                f"a recipe must not hold more than {LARGEST_RECIPE:,} values, those behind aliases included"
            )
        return None if node is None else loader.construct_document(node)
    finally:
        loader.dispose()


def _count_values(node: yaml.Node, counted: dict[yaml.Node, int]) -> int:
    """Number of values below a node; an alias to what it stands in counts as too many."""
    if node not in counted:
        counted[node] = LARGEST_RECIPE + 1  # until it is known
        inner = [part for item in node.value for part in item] if isinstance(node, yaml.MappingNode) else node.value
        below = inner if isinstance(node, yaml.CollectionNode) else ()
        counted[node] = 1 + sum(_count_values(part, counted) for part in below)
    return counted[node]


class _Loader(yaml.SafeLoader):
    """YAML in which 1e-4 is a number, and a key given twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        keys = [key.value for key, _ in node.value]
        for key, _ in node.value:
            if keys.count(key.value) > 1:
                raise yaml.constructor.ConstructorError(None, None, f"key {key.value!r} is given twice", key.start_mark)
        return super().construct_mapping(node, deep)


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)
