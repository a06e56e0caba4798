"""Evaluation through lm-eval (DESIGN section 10).

`evaluate` is the verb; `presets` says what runs and what is made of it, `harness` finds and loads tasks, and
`language_model` is our model as lm-eval wants it. lm-eval is optional: nothing here needs it to be imported.
"""

from palimpsa_surgery.stages.evaluation.evaluate import evaluate, parse_batch_size, parse_lengths

__all__ = ["evaluate", "parse_batch_size", "parse_lengths"]
