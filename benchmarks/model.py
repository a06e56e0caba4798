"""Time a whole model: a training step and a decoded token, with and without Palimpsa layers.

    python benchmarks/model.py --layers 0 8 --json model.json

Random weights in the shape of mamba2-2.7b (or `--size`), float32 master weights are left out: parameters are
bfloat16, as only the time of a forward and backward pass is compared. The loss is computed in blocks of tokens, so
that the logits of a long sequence never exist at once. Needs a CUDA device.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.kernels.scan import paths
from tuning import tuned_in_parallel

# d_model and layers of the released models (DESIGN section 6).
SIZES = {"130m": (768, 24), "370m": (1024, 48), "780m": (1536, 48), "1.3b": (2048, 48), "2.7b": (2560, 64)}
LOSS_BLOCK = 4096


def make_model(size: str, palimpsa_layers: int) -> PalimpsaMamba2ForCausalLM:
    """A random model whose Palimpsa layers are spread evenly over the depth."""
    hidden, depth = SIZES[size]
    config = PalimpsaMamba2Config(
        vocab_size=50288,
        hidden_size=hidden,
        num_hidden_layers=depth,
        num_heads=2 * hidden // 64,
        head_dim=64,
        state_size=128,
        n_groups=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        palimpsa_layers=[(2 * i + 1) * depth // (2 * palimpsa_layers) for i in range(palimpsa_layers)],
    )
    with torch.device("cuda"):
        return PalimpsaMamba2ForCausalLM(config).bfloat16()


def blockwise_loss(model: PalimpsaMamba2ForCausalLM, hidden_states: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Next-token loss over `hidden_states` `[1, T, hidden]`, recomputing each block's logits in the backward pass."""

    def block(states: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.lm_head(states).float(), targets, reduction="sum")

    states, targets = hidden_states[:, :-1].flatten(0, 1), ids[:, 1:].flatten()
    pieces = zip(states.split(LOSS_BLOCK), targets.split(LOSS_BLOCK), strict=True)
    return sum(checkpoint(block, s.to(model.dtype), t, use_reentrant=False) for s, t in pieces) / targets.numel()


def training_step(model: PalimpsaMamba2ForCausalLM, tokens: int, repeats: int) -> dict[str, float]:
    """Median seconds of a forward and backward pass over one sequence, and the peak memory in GiB."""
    model.train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(0, 50000, (1, tokens), device="cuda")
    seconds = []
    for i in range(repeats + 2):
        model.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        with tuned_in_parallel():
            blockwise_loss(model, model.backbone(ids, use_cache=False).last_hidden_state, ids).backward()
        torch.cuda.synchronize()
        print(f"step {i + 1}: {time.perf_counter() - start:.2f} s", flush=True)
        if i >= 2:  # the first two compile kernels and fill the allocator
            seconds.append(time.perf_counter() - start)
    model.zero_grad(set_to_none=True)
    return {"seconds": statistics.median(seconds), "peak_gib": torch.cuda.max_memory_allocated() / 2**30}


@torch.no_grad()
def decoding(model: PalimpsaMamba2ForCausalLM, batch: int, tokens: int, **options) -> float:
    """Seconds a token of `generate`, beyond the prompt and the first eight; kernels compile before."""
    model.eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(1, 50000, (batch, 64), device="cuda")
    seconds = []
    for count in (8, 8, 8 + tokens):
        torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False, **options)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    print(f"generate, {options or 'eager'}: first call {seconds[0]:.0f} s", flush=True)
    return (seconds[2] - seconds[1]) / tokens


def main() -> None:
    """Run the benchmark and print one line for each number of Palimpsa layers, with ratios to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="2.7b")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 8], help="numbers of Palimpsa layers")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--batch", type=int, default=8, help="sequences decoded together")
    parser.add_argument("--compiled", action="store_true", help="time decoding from a static cache too")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")

    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; {paths(torch.device('cuda'))}")
    results = []
    for layers in options.layers:
        torch.manual_seed(0)
        model = make_model(options.size, layers)
        step = training_step(model, options.tokens, options.repeats)
        token = {"eager": decoding(model, options.batch, 32)}
        if options.compiled:
            token["compiled"] = decoding(model, options.batch, 128, cache_implementation="static")
        del model
        torch.cuda.empty_cache()
        results.append({"palimpsa_layers": layers, "step": step, "decode": token})
        first = results[0]
        print(
            f"{layers:3d} Palimpsa layers: step {step['seconds']:.3f} s "
            f"({step['seconds'] / first['step']['seconds']:.3f}x, {options.tokens / step['seconds']:,.0f} tokens/s, "
            f"peak {step['peak_gib']:.1f} GiB), a token "
            + ", ".join(f"{k} {1e3 * v:.2f} ms ({v / first['decode'][k]:.3f}x)" for k, v in token.items()),
            flush=True,
        )
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "options": vars(options) | {"json": None}, "results": results}
        options.json.write_text(json.dumps(record, indent=2))


if __name__ == "__main__":
    main()
