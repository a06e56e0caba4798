"""Time and memory of the Palimpsa scan beside Mamba2's SSD and Simple GLA, in one process on one GPU.

    python benchmarks/kernels.py                    # table, and kernels.json beside the working directory
    python benchmarks/kernels.py --lengths 2048 32768 --heads 80

Compared where installed: `mamba_ssm`'s SSD (chunk 256) and `fla`'s Simple GLA (B and C expanded to heads, as it wants
them; its backward pass refuses some Triton versions, which is printed). Their kernels are tuned once, at 32k
tokens, before anything is timed; all configurations are compiled in parallel. Nothing is timed unless output and
gradients equal the float64 reference first. Ratios are to SSD, and mean more than milliseconds.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
import triton

from palimpsa_surgery.kernels import palimpsa_step, ssd_step
from palimpsa_surgery.kernels.reference import palimpsa_scan_reference
from palimpsa_surgery.kernels.scan import paths
from palimpsa_surgery.kernels.triton_scan import palimpsa_scan_triton
from tuning import tuned_in_parallel

NAMES = ("x", "dt", "A", "B", "C", "beta", "I_prior")
TOLERANCE = 5e-3
TUNING_LENGTH = 32768


def make(batch: int, tokens: int, heads: int, head_dim: int, state_size: int, groups: int) -> dict[str, torch.Tensor]:
    """Arguments of a scan in bfloat16, with windows of 3 to 1,000 tokens."""
    generator = torch.Generator("cuda").manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda")

    dt = F.softplus(normal(batch, tokens, heads) - 3)
    return {
        "x": normal(batch, tokens, heads, head_dim).bfloat16(),
        "dt": dt,
        "A": torch.exp(normal(heads)),
        "B": normal(batch, tokens, groups, state_size).bfloat16(),
        "C": normal(batch, tokens, groups, state_size).bfloat16(),
        "beta": (torch.sigmoid(normal(batch, tokens, heads, head_dim)) * 0.5 * dt[..., None]).bfloat16(),
        "I_prior": torch.ones(heads, device="cuda"),
    }


def verify() -> dict[str, float]:
    """Relative errors of output and gradients against float64, with several lengths; the worst of each."""
    worst: dict[str, float] = {}
    for tokens in (1, 65, 1025):
        arguments, dy, results = make(2, tokens, 8, 64, 128, 1), None, []
        for scan, dtype in ((palimpsa_scan_triton, None), (palimpsa_scan_reference, torch.float64)):
            leaves = [v.to(dtype or v.dtype).requires_grad_() for v in arguments.values()]
            y = scan(*leaves)[0]
            if dy is None:  # with a random gradient alone those of A and I_prior cancel down to rounding errors
                noise = torch.randn(y.shape, generator=torch.Generator("cuda").manual_seed(1), device="cuda")
                dy = (y.detach() / y.detach().float().std() + noise).bfloat16()
            results.append([y.detach(), *torch.autograd.grad(y, leaves, dy.to(y.dtype))])
        for name, ours, exact in zip(("y", *NAMES), *results, strict=True):
            if name == "A" and tokens == 1:  # zero but for rounding
                continue
            error = ((ours.double() - exact).norm() / exact.norm()).item()
            worst[name] = max(worst.get(name, 0.0), error) if error == error else float("nan")
    return worst


def milliseconds(function: Callable[[], object], repeats: int) -> float:
    """Median time of a call after two warm-ups."""
    times = []
    for i in range(repeats + 2):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        function()
        end.record()
        torch.cuda.synchronize()
        if i >= 2:
            times.append(start.elapsed_time(end))
    return statistics.median(times)


def extra_gibibytes(function: Callable[[], object]) -> float:
    """Peak memory of a call above what was allocated before, its results included."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = function()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    del result
    return (peak - before) / 2**30


def kernels() -> dict[str, tuple[Callable, tuple[str, ...]]]:
    """Name to the scan as a function of the arguments, and which of them it differentiates."""
    found: dict[str, tuple[Callable, tuple[str, ...]]] = {}
    try:
        from mamba_ssm.ops.triton.ssd_combined import mamba_chunk_scan_combined

        def ssd(x, dt, A, B, C, beta, I_prior):
            return mamba_chunk_scan_combined(x, dt, -A, B, C, chunk_size=256)

        found["ssd"] = (ssd, NAMES[:5])
    except Exception as error:  # a source install without its compiled module fails in many ways
        print(f"mamba_ssm left out: {error}", file=sys.stderr)
    try:
        from fla.ops.simple_gla import chunk_simple_gla

        def simple_gla(x, dt, A, B, C, beta, I_prior):
            expand = x.shape[2] // B.shape[2]
            query, key = (v.repeat_interleave(expand, 2) for v in (C, B))
            return chunk_simple_gla(query, key, (dt[..., None] * x).to(x.dtype), g=-A * dt, scale=1.0)[0]

        found["simple_gla"] = (simple_gla, NAMES[:5])
    except Exception as error:
        print(f"fla left out: {error}", file=sys.stderr)
    found["palimpsa"] = (lambda **a: palimpsa_scan_triton(**a)[0], NAMES[:-1])
    return found


def calls(scan: Callable, names: tuple[str, ...], arguments: dict[str, torch.Tensor]) -> tuple[Callable, Callable]:
    """Forward, and forward + backward, as functions of nothing."""
    leaves = {k: v.detach().requires_grad_(k in names) for k, v in arguments.items()}
    dy = torch.randn_like(arguments["x"])

    def forward() -> torch.Tensor:
        with torch.no_grad():
            return scan(**leaves)

    def both() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(scan(**leaves), [leaves[k] for k in names], dy)

    return forward, both


def tune(name: str, forward: Callable, both: Callable) -> dict[str, str]:
    """Compile and tune a kernel, saying how long it took; for "forward" and "both", why it refuses, if it does."""
    start, refused = time.perf_counter(), {}
    with tuned_in_parallel():
        for what, function in (("forward", forward), ("both", both)):
            try:
                function()
            except Exception as error:
                refused[what] = f"{type(error).__name__}: {error}".splitlines()[0][:200]
    torch.cuda.synchronize()
    print(f"compiled {name} in {time.perf_counter() - start:.0f} s", flush=True)
    for what, reason in refused.items():
        print(f"{name} refuses {'its backward' if what == 'both' else 'its forward'} pass: {reason}", flush=True)
    return refused


def measure(forward: Callable, both: Callable, repeats: int, refused: dict[str, str]) -> dict[str, float | None]:
    """Times in milliseconds and the extra memory of forward + backward, None where refused or out of memory."""
    row: dict[str, float | None] = {"forward_ms": None, "both_ms": None, "extra_gib": None}
    try:
        if "forward" not in refused:
            row["forward_ms"] = milliseconds(forward, repeats)
        if "both" not in refused:
            row["both_ms"] = milliseconds(both, repeats)
            row["extra_gib"] = extra_gibibytes(both)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
    return row


def decode(batch: int, heads: int) -> dict[str, float]:
    """Microseconds of one decoding step on the device, launches excluded: a CUDA graph of 20 steps is replayed."""
    arguments = make(batch, 1, heads, 64, 128, 1)
    x, dt, A, B, C, beta, prior = (v[:, 0] if v.ndim > 2 else v for v in arguments.values())
    state = torch.zeros(batch, heads, 2, 64, 128, device=x.device)
    mamba2_state = torch.zeros(batch, heads, 64, 128, device=x.device)
    steps: dict[str, Callable[[], object]] = {"palimpsa": lambda: palimpsa_step(x, dt, A, B, C, beta, prior, state)}
    if paths(x.device)["Mamba2 decoding"].startswith("mamba_ssm"):
        steps["ssd"] = lambda: ssd_step(x, dt, A, B, C, mamba2_state)
    found = {}
    for name, step in steps.items():
        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(20):
                step()
        found[name] = 1e3 * milliseconds(graph.replay, 10) / 20
    return found


def main() -> int:
    """Verify, measure, print a table, write JSON; 1 when the kernels are wrong."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2**i for i in range(10, 18)])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--heads", type=int, default=80)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--output", type=Path, default=Path("kernels.json"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("error: needs a CUDA device", file=sys.stderr)
        return 2
    errors = verify()
    if not all(error <= TOLERANCE for error in errors.values()):
        print(f"error: wrong results, nothing is timed; relative errors: {errors}", file=sys.stderr)
        return 1
    device = torch.cuda.get_device_name()
    print(
        f"{device}, torch {torch.__version__}, triton {triton.__version__}, bfloat16, batch {options.batch}, "
        f"{options.heads} heads of 64 x 128, 1 group; worst error {max(errors.values()):.1e}",
        flush=True,
    )
    compared = kernels()
    long = make(options.batch, min(max(options.lengths), TUNING_LENGTH), options.heads, 64, 128, 1)
    refused = {name: tune(name, *calls(*kernel, long)) for name, kernel in compared.items()}
    del long
    print(f"{'kernel':<11}{'tokens':>8}{'fwd ms':>9}{'x SSD':>7}{'f+b ms':>9}{'x SSD':>7}{'GiB':>7}{'us/token':>10}")
    rows = []
    for tokens in options.lengths:
        arguments = make(options.batch, tokens, options.heads, 64, 128, 1)
        ssd: dict = {}
        for name, kernel in compared.items():
            row = measure(*calls(*kernel, arguments), options.repeats, refused[name])
            ssd = row if name == "ssd" else ssd
            for key in ("forward_ms", "both_ms", "extra_gib"):
                row[f"{key}_to_ssd"] = row[key] / ssd[key] if row[key] and ssd.get(key) else None
            rows.append({"kernel": name, "tokens": tokens, **row, "refused": refused[name]})
            cells = [row["forward_ms"], row["forward_ms_to_ssd"], row["both_ms"], row["both_ms_to_ssd"]]
            cells += [row["extra_gib"], row["both_ms"] and 1e3 * row["both_ms"] / tokens / options.batch]
            widths = (9, 7, 9, 7, 7, 10)
            text = [f"{'-' if v is None else f'{v:.2f}':>{w}}" for v, w in zip(cells, widths, strict=True)]
            print(f"{name:<11}{tokens:>8}{''.join(text)}", flush=True)
    steps = {str(batch): decode(batch, options.heads) for batch in (1, 8)}
    for batch, step in steps.items():
        ratio = f", {step['palimpsa'] / step['ssd']:.2f}x" if "ssd" in step else ""
        print(f"decoding step, batch {batch}: {', '.join(f'{k} {v:.1f} us' for k, v in step.items())}{ratio}")
    report = {"device": device, "torch": torch.__version__, "triton": triton.__version__, "errors": errors}
    report |= {"batch": options.batch, "heads": options.heads, "rows": rows, "decode_us": steps}
    options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
