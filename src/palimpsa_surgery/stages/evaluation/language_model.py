"""Our model as lm-eval's `HFLM`: it counts what is cut, notices NaN logits, and runs on several processes.

This module imports lm-eval, which is an optional dependency: import it once `harness.require_lm_eval` has passed.
"""

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from accelerate import Accelerator
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from palimpsa_surgery.errors import UserError
from palimpsa_surgery.surgery.devices import out_of_memory
from palimpsa_surgery.surgery.dtypes import dtype_name

if TYPE_CHECKING:
    from torch import Tensor


@dataclass
class Lengths:
    """How long the requests of a task are.

    Attributes:
        longest: tokens of the longest request, those to be generated included.
        truncated: numbers of the documents whose beginning was cut.
        split: numbers of the documents that were read in several windows.
    """

    longest: int = 0
    truncated: set[int] = field(default_factory=set)
    split: set[int] = field(default_factory=set)

    def add(self, document: int, tokens: int, room: int) -> None:
        """Count a request of `tokens` tokens, of which the last `room` are read."""
        self.longest = max(self.longest, tokens)
        if tokens > room:
            self.truncated.add(document)


class CountingLM(HFLM):
    """HFLM around a loaded model, whose numbers it leaves as they are.

    Attributes:
        lengths: by task, of the requests of this process.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase,
        *,
        max_length: int,
        batch_size: int | str,
        accelerator: Accelerator | None = None,
    ) -> None:
        """Wrap a model that is already on its device.

        Args:
            max_length: tokens beyond which requests are cut from the left.
            batch_size: requests computed at once, or "auto": as many as fit.
            accelerator: of this process, if it is one of several; lm-eval then shares out the documents.
        """
        super().__init__(pretrained=model, tokenizer=tokenizer, max_length=max_length, batch_size=batch_size)
        self.lengths: dict[str, Lengths] = {}
        self._scored: Sequence[Instance] | None = None
        if accelerator is not None:  # HFLM does this for models that it loads itself
            self.accelerator = accelerator
            self._rank, self._world_size = accelerator.process_index, accelerator.num_processes

    def _of(self, request: Instance) -> Lengths:
        return self.lengths.setdefault(request.task_name, Lengths())

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations; see HFLM."""
        self._scored = requests
        try:
            return super().loglikelihood(requests, disable_tqdm=disable_tqdm)
        finally:
            self._scored = None

    def _loglikelihood_tokens(self, requests: Sequence[tuple], *args, **kwargs) -> list[tuple[float, bool]]:
        """Count the tokenised requests of `loglikelihood`; those of `loglikelihood_rolling` always fit."""
        if self._scored is not None:
            for instance, (_, context, continuation) in zip(self._scored, requests, strict=True):
                where = f"task {instance.task_name}, document {instance.doc_id}"
                if not continuation:
                    raise UserError(f"{where}: there is nothing to score after the prompt")
                if len(continuation) > self.max_length:
                    raise UserError(
                        f"{where}: an answer of {len(continuation):,} tokens exceeds the length of "
                        f"{self.max_length:,} (--max-length)"
                    )
                # The last token is only predicted, so one more than the length fits.
                self._of(instance).add(instance.doc_id, len(context) + len(continuation) - 1, self.max_length)
        return super()._loglikelihood_tokens(requests, *args, **kwargs)

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Score whole texts, those beyond the length in windows; see HFLM."""
        for request in requests:
            tokens, lengths = len(self.tok_encode(request.args[0])), self._of(request)
            lengths.longest = max(lengths.longest, tokens)
            if tokens > self.max_length:
                lengths.split.add(request.doc_id)
        return super().loglikelihood_rolling(requests, disable_tqdm=disable_tqdm)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate; see HFLM."""
        for request in requests:
            prompt, options = request.args
            generated = normalize_gen_kwargs(options, self.max_gen_toks)["max_gen_toks"]
            if generated >= self.max_length:
                raise UserError(
                    f"task {request.task_name} generates {generated:,} tokens, which leaves no room for a prompt in a "
                    f"length of {self.max_length:,} (--max-length)"
                )
            tokens = len(self.tok_encode(prompt)) + generated
            self._of(request).add(request.doc_id, tokens, self.max_length)
        return super().generate_until(requests, disable_tqdm=disable_tqdm)

    def _model_call(self, inps: "Tensor", *_args, **_kwargs) -> "Tensor":
        """Logits of a batch; HFLM's own call would keep the states of every row, which nobody continues from.

        Raises:
            torch.OutOfMemoryError: whoever found that a GPU's memory does not suffice, which makes `auto` try less.
        """
        try:
            with torch.no_grad():
                return self.model(inps, use_cache=False).logits
        except RuntimeError as error:
            if out_of_memory(error):
                raise torch.OutOfMemoryError(f"{self.device} is out of memory.") from error
            raise

    def all_lengths(self) -> dict[str, Lengths] | None:
        """The lengths of all processes' requests on the first one, None on the others."""
        gathered = self.gather_object(self.lengths)
        if gathered is None:
            return None
        merged: dict[str, Lengths] = {}
        for name, part in (item for lengths in gathered for item in lengths.items()):
            whole = merged.setdefault(name, Lengths())
            whole.longest = max(whole.longest, part.longest)
            whole.truncated |= part.truncated
            whole.split |= part.split
        return merged


@contextmanager
def finite_logits(model: PreTrainedModel, name: str) -> Iterator[None]:
    """Raise UserError as soon as the model predicts NaN or infinity, in scoring and in generating alike."""

    def check(_module: torch.nn.Module, _arguments: tuple, output: object) -> None:
        logits: Tensor = output.logits
        if logits.numel() and not all(torch.isfinite(end) for end in logits.aminmax()):  # without a mask of their size
            raise UserError(f"model {name} predicts NaN or infinity (in {dtype_name(model.dtype)})")

    handle = model.register_forward_hook(check)
    try:
        yield
    finally:
        handle.remove()


def silence_lm_eval() -> None:
    """Keep lm-eval's warnings to itself: one for each request that is cut, which we count instead."""
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
