"""Model surgery that gives pretrained Mamba2 language models a metaplastic memory.

Every verb of the command line is a function of the same name here: `analyze`, `replace`, `recipes`, `train`,
`export`, `diagnose`, `compare`, `demo`, `doctor`; `eval` is `evaluate`, since Python has an `eval` of its own. They are
imported on first use, because torch and transformers take seconds to import.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from palimpsa_surgery._version import __version__

if TYPE_CHECKING:
    from palimpsa_surgery.stages.catalog import recipes
    from palimpsa_surgery.stages.demo import demo
    from palimpsa_surgery.stages.evaluation import evaluate
    from palimpsa_surgery.stages.pipeline import train
    from palimpsa_surgery.surgery.analysis import analyze
    from palimpsa_surgery.surgery.comparison import compare
    from palimpsa_surgery.surgery.diagnosis import diagnose
    from palimpsa_surgery.surgery.doctor import doctor
    from palimpsa_surgery.surgery.export import export
    from palimpsa_surgery.surgery.replacement import replace

_VERBS = {
    "analyze": "palimpsa_surgery.surgery.analysis",
    "replace": "palimpsa_surgery.surgery.replacement",
    "recipes": "palimpsa_surgery.stages.catalog",
    "train": "palimpsa_surgery.stages.pipeline",
    "export": "palimpsa_surgery.surgery.export",
    "evaluate": "palimpsa_surgery.stages.evaluation",
    "diagnose": "palimpsa_surgery.surgery.diagnosis",
    "compare": "palimpsa_surgery.surgery.comparison",
    "demo": "palimpsa_surgery.stages.demo",
    "doctor": "palimpsa_surgery.surgery.doctor",
}

__all__ = [
    "__version__",
    "analyze",
    "compare",
    "demo",
    "diagnose",
    "doctor",
    "evaluate",
    "export",
    "recipes",
    "replace",
    "train",
]


def __getattr__(name: str) -> Any:
    if name in _VERBS:
        return getattr(import_module(_VERBS[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
