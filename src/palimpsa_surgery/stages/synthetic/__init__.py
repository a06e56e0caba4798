"""Synthetic tasks, offline and seeded: training data, evaluation with a score, and lm-eval tasks.

Two kinds. Text tasks (`generate`) make prompts whose hay is sized so that prompt and answer have a number of
tokens: `passkey`, `variables`, `needles` with RULER's `niah_*` presets, and `copying`. Token tasks
(`generate_tokens`) make arrays of token ids: `mqar` and `copying`. The seed and an example's number decide
what it is, on every platform.
"""

from palimpsa_surgery.stages.synthetic.example import IGNORED, Example, TokenBatch
from palimpsa_surgery.stages.synthetic.lm_eval_task import write_lm_eval_tasks
from palimpsa_surgery.stages.synthetic.mqar import CURRICULUM, mqar
from palimpsa_surgery.stages.synthetic.registry import (
    TEXT_TASKS,
    TOKEN_TASKS,
    generate,
    generate_tokens,
    make_task,
    score,
)
from palimpsa_surgery.stages.synthetic.scoring import string_match_all, string_match_part, token_accuracy

__all__ = [
    "CURRICULUM",
    "IGNORED",
    "TEXT_TASKS",
    "TOKEN_TASKS",
    "Example",
    "TokenBatch",
    "generate",
    "generate_tokens",
    "make_task",
    "mqar",
    "score",
    "string_match_all",
    "string_match_part",
    "token_accuracy",
    "write_lm_eval_tasks",
]
