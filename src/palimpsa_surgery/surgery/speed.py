"""How fast a model runs on the device at hand, and how much it carries along."""

import statistics
import time
from dataclasses import dataclass

import torch

from palimpsa_surgery.hf_models import PalimpsaMamba2ForCausalLM

_DECODED = 32  # tokens generated
_REPEATS = 3  # of each measurement, after one that is not counted


@dataclass(frozen=True)
class Speed:
    """How fast a model runs, one sequence at a time.

    Attributes:
        prompt_tokens: length of the prompt.
        prefill: tokens of the prompt read in a second, median of three runs.
        decode: tokens generated in a second after it, one at a time, median of three runs of 32.
    """

    prompt_tokens: int
    prefill: float
    decode: float


@torch.inference_mode()
def bytes_of_states(model: PalimpsaMamba2ForCausalLM) -> int:
    """Bytes that the model carries from one token of a sequence to the next: recurrent states and conv tails."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=model.device)
    states = model.backbone(ids, return_final_states=True, use_cache=False).final_states
    return sum(part.numel() * part.element_size() for state in states for part in state)


@torch.inference_mode()
def measure_speed(model: PalimpsaMamba2ForCausalLM, prompt_tokens: int) -> Speed:
    """Time a prompt and the tokens after it, in a batch of one."""
    ids = torch.arange(prompt_tokens, device=model.device)[None] % model.config.vocab_size
    prefill, decode = [], []
    for _ in range(_REPEATS + 1):
        start = _now(model.device)
        output = model(ids, use_cache=True, logits_to_keep=1)
        prefill.append(_now(model.device) - start)
        start = _now(model.device)
        for _ in range(_DECODED):
            output = model(output.logits.argmax(-1), cache=output.cache, use_cache=True)
        decode.append(_now(model.device) - start)
    return Speed(
        prompt_tokens,
        prefill=round(prompt_tokens / statistics.median(prefill[1:]), 1),
        decode=round(_DECODED / statistics.median(decode[1:]), 1),
    )


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
