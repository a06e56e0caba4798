"""Which layers to replace: those that remember longest (paper 3.4 and A.10), a threshold, or a list."""

import math
from collections.abc import Collection, Sequence

from palimpsa_surgery.errors import UserError

DEFAULT_TOP_K = 8
"""Layers chosen where no rule is given: the paper replaces 8 of 64."""


def top_layers(windows: Sequence[float], k: int, *, palimpsa: Collection[int] = ()) -> list[int]:
    """The `k` layers with the longest windows, longest first; of equal ones the lower index comes first.

    Args:
        windows: score of each layer in tokens; inf is allowed.
        k: how many; as many as there are when there are fewer.
        palimpsa: layers that are Palimpsa layers already, which are left out.
    """
    candidates = [layer for layer in range(len(windows)) if layer not in palimpsa]
    return sorted(candidates, key=lambda layer: (-windows[layer], layer))[:k]


def select_layers(
    num_layers: int,
    windows: Sequence[float] | None = None,
    *,
    top_k: int | None = None,
    layers: Sequence[int] | None = None,
    min_window: float | None = None,
    palimpsa: Collection[int] = (),
) -> list[int]:
    """Apply the one rule that is given, or else `top_k` = 8, and return the layers to replace, increasing.

    Args:
        num_layers: depth of the model.
        windows: score of each layer in tokens; `layers` and `top_k=0` do without.
        top_k: so many layers with the longest windows; 0 selects none.
        layers: these layers, in any order.
        min_window: every layer whose window is at least so many tokens.
        palimpsa: layers that are Palimpsa layers already; they are never selected.

    Raises:
        UserError: more than one rule, no windows for a rule that needs them, or a rule that cannot be met.
    """
    rules = {"top_k": top_k, "layers": layers, "min_window": min_window}
    given = [name for name, value in rules.items() if value is not None]
    if len(given) > 1:
        raise UserError(f"choose layers by one of {', '.join(rules)}; got {', '.join(given)}")
    if not given:
        top_k, given = DEFAULT_TOP_K, ["top_k"]
    if layers is not None:
        return _listed(num_layers, layers, palimpsa)
    if top_k == 0:
        return []
    if windows is None:
        raise UserError(f"{given[0]} needs an analysis, which says how long each layer remembers")
    if len(windows) != num_layers:
        raise UserError(f"the analysis has {len(windows)} layers, the model {num_layers}")
    if top_k is not None:
        available = num_layers - len(palimpsa)
        if not 0 <= top_k <= available:
            what = "Mamba2 layers left" if palimpsa else "layers"
            raise UserError(f"top_k must be from 0 to {available}, the number of {what}; got {top_k}")
        return sorted(top_layers(windows, top_k, palimpsa=palimpsa))
    if math.isnan(min_window) or min_window < 1:
        raise UserError(f"min_window must be at least 1 token, got {min_window}")
    candidates = [layer for layer in range(num_layers) if layer not in palimpsa]
    chosen = [layer for layer in candidates if windows[layer] >= min_window]
    if not chosen:
        longest = max((windows[layer] for layer in candidates), default=math.nan)
        raise UserError(f"no layer has a window of at least {min_window:g} tokens; the longest has {longest:.4g}")
    return chosen


def parse_layers(text: str) -> list[int]:
    """Layers from a list such as "3,8".

    Raises:
        UserError: it is something else.
    """
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"layers must be whole numbers separated by commas, such as 3,8; got {text!r}") from None


def _listed(num_layers: int, layers: Sequence[int], palimpsa: Collection[int]) -> list[int]:
    if not layers:
        raise UserError("the list of layers is empty (top_k=0 converts without replacing any)")
    outside = sorted({layer for layer in layers if not 0 <= layer < num_layers})
    if outside:
        raise UserError(f"layers must be from 0 to {num_layers - 1}, got {_join(outside)}")
    repeated = sorted({layer for layer in layers if layers.count(layer) > 1})
    if repeated:
        raise UserError(f"layers are listed more than once: {_join(repeated)}")
    already = sorted(set(layers) & set(palimpsa))
    if already:
        raise UserError(f"layers are Palimpsa layers already: {_join(already)}")
    return sorted(layers)


def _join(layers: Sequence[int]) -> str:
    return ", ".join(map(str, layers))
