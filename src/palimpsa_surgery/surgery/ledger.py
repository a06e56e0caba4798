"""What surgery does to the parameters: kinds, keys and bytes before and after, computed from shapes alone."""

from dataclasses import dataclass
from math import prod
from typing import get_args

import torch

from palimpsa_surgery.hf_models import PalimpsaMamba2Config
from palimpsa_surgery.surgery.keys import KeyRule, Kind, key_table


@dataclass(frozen=True)
class Ledger:
    """Parameters before and after surgery. Tied embeddings count once.

    Attributes:
        before: number of parameters of each kind in the source; kinds that neither model has are left out.
        after: the same for the result.
        copied: rules of the tensors that are copied bit for bit.
        new: rules of the tensors that only the result has.
        dropped: rules of the tensors that only the source has.
    """

    before: dict[Kind, int]
    after: dict[Kind, int]
    copied: tuple[KeyRule, ...]
    new: tuple[KeyRule, ...]
    dropped: tuple[KeyRule, ...]

    @property
    def parameters(self) -> dict[str, int]:
        """Number of parameters copied, new and dropped."""
        return {name: sum(rule.size for rule in getattr(self, name)) for name in ("copied", "new", "dropped")}

    def bytes(self, dtype: torch.dtype) -> int:
        """Expected size of the result's weights in this type."""
        return sum(self.after.values()) * dtype.itemsize


def ledger(before: PalimpsaMamba2Config, after: PalimpsaMamba2Config) -> Ledger:
    """Compare the parameters that two configs imply.

    A tensor of the same name but another shape counts as dropped and new.
    """
    old, new = ({rule.key: rule for rule in key_table(config) if rule.use == "copied"} for config in (before, after))
    counts = [{kind: 0 for kind in get_args(Kind)} for _ in range(2)]
    for count, rules in zip(counts, (old, new), strict=True):
        for rule in rules.values():
            count[rule.kind] += prod(rule.shape)
    kinds = [kind for kind in get_args(Kind) if counts[0][kind] or counts[1][kind]]
    kept = {key for key in new if key in old and old[key].shape == new[key].shape}
    return Ledger(
        before={kind: counts[0][kind] for kind in kinds},
        after={kind: counts[1][kind] for kind in kinds},
        copied=tuple(rule for key, rule in new.items() if key in kept),
        new=tuple(rule for key, rule in new.items() if key not in kept),
        dropped=tuple(rule for key, rule in old.items() if key not in kept),
    )
