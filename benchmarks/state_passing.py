"""Does state initialisation mend a model that degrades beyond its training length? (arXiv 2507.02782, Fig. 5.)

    python benchmarks/state_passing.py tokenise kjv.txt /usr/lib/python3.11 --output tokens.npy
    python benchmarks/state_passing.py run tokens.npy --output state-passing --pretrain-seconds 60 --arm-seconds 20

`run` trains tiny-mamba2's shape from scratch on short sequences, and measures perplexity by position far beyond them.
From that one checkpoint it trains on with each kind of `stages.states`, all for as many steps as the first manages in
its time, on the same sequences (tbtt: its own order) and the same learning rates, and measures again on the same text.
Unlike the paper it trains on from zero states too, for otherwise the effect would not be told from that of more
training. Prints a table, and writes `results.json` and `perplexity.png`.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.kernels.scan import paths
from palimpsa_surgery.stages.optimisation import parameters_by_treatment
from palimpsa_surgery.stages.recipe import FittedNoise, RandomNoise, StatePassing, Tbtt, ZeroState
from palimpsa_surgery.stages.states import InitialStates, make_initial_states
from palimpsa_surgery.surgery.assets import asset_path
from palimpsa_surgery.surgery.diagnosis import LossByPosition, PositionLoss

ARMS = {
    "zero": ZeroState(),
    "random_noise": RandomNoise(kind="random_noise", sigma=0.1),
    "fitted_noise": FittedNoise(kind="fitted_noise"),
    "state_passing": StatePassing(kind="state_passing"),
    "tbtt": Tbtt(kind="tbtt"),
}
HELD_OUT = 0.08  # of the tokens, in blocks spread over them, so that both see the same kinds of text
HELD_OUT_BLOCKS = 4  # few and long, so that a position of a window is not always the same text
PIECE = 2048  # tokens of a row in a forward pass of the evaluation
ROWS = 32  # of such a pass
WARMUP = 0.1  # of the steps
FINAL_RATE = 0.1  # of the peak, at the end of a cosine


def tokenise(files: list[Path], output: Path) -> None:
    """Write the ids of text files (of a folder: its Python sources) as one array with end-of-text tokens between."""
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(asset_path("tiny-mamba2") / "tokenizer.json"))
    end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    ids: list[int] = []
    for file in files:
        for path in sorted(file.rglob("*.py")) if file.is_dir() else [file]:
            if "site-packages" not in path.relative_to(file).parts:
                text = path.read_text(encoding="utf-8", errors="replace")
                ids += [*tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], end]
    np.save(output, np.asarray(ids, dtype=np.uint16))
    print(f"{len(ids):,} tokens")


def make_model(args: argparse.Namespace) -> PalimpsaMamba2ForCausalLM:
    """tiny-mamba2's shape (or `--shape`) with random weights."""
    hidden, layers, state_size = args.shape
    torch.manual_seed(args.seed)
    config = PalimpsaMamba2Config(
        vocab_size=args.vocab_size,
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_heads=2 * hidden // 64,
        head_dim=64,
        state_size=state_size,
        n_groups=1,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        palimpsa_layers=args.palimpsa_layers,
        time_step_min=args.time_steps[0],
        time_step_max=args.time_steps[1],
        time_step_floor=args.time_steps[0],
    )
    return PalimpsaMamba2ForCausalLM(config).to(args.device).train()


class Text:
    """Token ids on the device: training text, and windows of held-out text.

    Args:
        ids: all of them.
        length: of a training sequence.
        batch: rows of a training batch.
        window: of the evaluation, in tokens.
    """

    def __init__(self, ids: Tensor, *, length: int, batch: int, window: int, windows: int, seed: int) -> None:
        block = int(len(ids) * HELD_OUT) // HELD_OUT_BLOCKS
        if block <= window:
            raise SystemExit(f"{len(ids)} tokens leave held-out blocks of {block}, the windows need {window + 1}")
        stretches = ids.tensor_split(HELD_OUT_BLOCKS)
        self.training = torch.cat([stretch[:-block] for stretch in stretches])
        held_out = [stretch[-block:] for stretch in stretches]
        self.length, self.batch = length, batch
        self.offsets = torch.arange(length, device=ids.device)
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(block - window, (windows,), generator=generator).tolist()
        self.windows = torch.stack([held_out[i % HELD_OUT_BLOCKS][s : s + window + 1] for i, s in enumerate(starts)])
        """`[windows, window + 1]`."""

    def shuffled(self, seed: int) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Batches `[batch, length]` from random places."""
        generator = torch.Generator(self.training.device).manual_seed(seed)
        last = len(self.training) - self.length
        while True:
            starts = torch.randint(last, (self.batch, 1), generator=generator, device=self.training.device)
            yield self.training[starts + self.offsets].long(), None

    def in_order(self, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Batches whose rows read on, each in its own part of the text; whether they do is the second item."""
        lane = len(self.training) // self.batch
        starts = torch.arange(self.batch, device=self.training.device)[:, None] * lane
        step = 0
        while True:
            place = step % (lane // self.length)
            continues = torch.full((self.batch,), place > 0, device=self.training.device)
            yield self.training[starts + place * self.length + self.offsets].long(), continues
            step += 1


def train(
    model: PalimpsaMamba2ForCausalLM,
    batches: Iterator[tuple[Tensor, Tensor | None]],
    states: InitialStates,
    *,
    rate: float,
    seconds: float,
    steps: int | None = None,
) -> dict[str, float]:
    """Train with AdamW, a warm-up and a cosine: for `steps`, or else as long as `seconds` last.

    With a number of steps, the time is a limit that is said to have been hit, never passed.
    """
    groups = []
    for treatment, parameters in parameters_by_treatment(model).items():
        if treatment.rate is not None:
            groups.append({"params": parameters, "weight_decay": 0.1 if treatment.decays else 0.0})
    cuda = next(model.parameters()).is_cuda
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=cuda or None)
    start, done, losses = time.perf_counter(), 0, []
    tokens = 0
    while True:
        elapsed = time.perf_counter() - start
        share = elapsed / seconds if steps is None else done / steps
        if share >= 1 or elapsed >= (seconds if steps is None else 1.5 * seconds):
            break
        warm = min(1.0, (share + 1e-3) / WARMUP)
        cosine = FINAL_RATE + (1 - FINAL_RATE) * 0.5 * (1 + math.cos(math.pi * share))
        for group in optimizer.param_groups:
            group["lr"] = rate * warm * cosine
        ids, continues = next(batches)
        with torch.autocast("cuda", torch.bfloat16, enabled=cuda):
            output = model(
                ids,
                labels=ids,
                initial_states=states.before(len(ids), continues),
                return_final_states=states.wants_final,
                return_logits=False,
                use_cache=False,
            )
        output.loss.backward()
        if states.wants_final:
            states.after(output.final_states)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        done += 1
        tokens += ids.numel()
        if done % 20 == 0:  # also keeps the queue of launches short, so that the clock is right
            losses.append(output.loss.item())
            if done % 100 == 0:
                print(f"  step {done}, {tokens / 1e6:.1f}M tokens, loss {losses[-1]:.3f}", flush=True)
    return {
        "steps": done,
        "tokens": tokens,
        "seconds": round(time.perf_counter() - start, 1),
        "loss": sum(losses[-5:]) / max(1, len(losses[-5:])),
        "planned_steps": steps,
    }


@torch.no_grad()
def evaluate(
    model: PalimpsaMamba2ForCausalLM, windows: Tensor, edges: list[int], length: int
) -> tuple[PositionLoss, PositionLoss]:
    """Loss by position over the windows `[W, T + 1]` from zero states, and of the same tokens in a short context.

    The second starts anew every `length` tokens and counts what has `length` to `2 * length - 1` tokens before it: what
    the first has beyond it is what a long context costs or gains, whatever the text.
    """
    model.eval()
    tokens = windows.shape[1] - 1
    whole, short = [], []
    for rows in windows.split(ROWS):
        pieces, states = [], None
        for start in range(0, tokens, PIECE):
            piece, states = _nll(model, rows[:, start : start + PIECE + 1], states)
            pieces.append(piece)
        whole.append(torch.cat(pieces, 1))
        chunks = rows.unfold(1, 2 * length + 1, length)  # [rows, chunks, 2 * length + 1]
        pieces = [_nll(model, part.flatten(0, 1), None)[0] for part in chunks.split(PIECE // length, dim=1)]
        pieces = [piece.view(len(rows), -1, 2 * length)[:, :, length:].flatten(1) for piece in pieces]
        # The first tokens have no more context than that in the first reading either.
        short.append(torch.cat((whole[-1][:, :length], *pieces), 1))
    model.train()
    return tuple(_summary(torch.cat(nll), edges) for nll in (whole, short))


def _nll(model: PalimpsaMamba2ForCausalLM, ids: Tensor, states: list | None) -> tuple[Tensor, list]:
    """Losses `[rows, T]` of the tokens after the first in `[rows, T + 1]`, and the states behind the last but one."""
    ids = ids.long()
    with torch.autocast("cuda", torch.bfloat16, enabled=ids.is_cuda):
        output = model(ids[:, :-1], initial_states=states, return_final_states=True, use_cache=False)
    nll = F.cross_entropy(output.logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return nll.view(len(ids), -1), output.final_states


def _summary(nll: Tensor, edges: list[int]) -> PositionLoss:
    losses = LossByPosition(edges)
    for row in nll:
        losses.add(row)
        losses.finish_sequence()
    return losses.summary()


def by_octave(loss: PositionLoss) -> dict[int, float]:
    """Perplexity of the positions from each power of two up to the next."""
    sums: dict[int, list[float]] = {}
    for start, nll, tokens in zip(loss.starts, loss.nll_sums, loss.tokens, strict=True):
        total = sums.setdefault(1 << (start.bit_length() - 1), [0.0, 0.0])
        total[0] += nll
        total[1] += tokens
    return {start: math.exp(nll / tokens) for start, (nll, tokens) in sums.items()}


def degradation(perplexity: dict[int, float], position: int) -> float:
    """Perplexity in the octave that ends at `position`, over the smallest of any octave up to there."""
    last = max(start for start in perplexity if 2 * start <= position)
    return perplexity[last] / min(value for start, value in perplexity.items() if start <= last)


def run(args: argparse.Namespace) -> None:
    """The whole experiment; everything measured so far is on disk after every arm."""
    began = time.perf_counter()
    torch.backends.cuda.matmul.allow_tf32 = True  # the scan of Mamba2 layers in PyTorch multiplies in float32
    ids = torch.from_numpy(np.load(args.tokens).astype(np.int32)).to(args.device)
    text = Text(ids, length=args.length, batch=args.batch, window=args.window, windows=args.windows, seed=args.seed)
    edges = [1 << k for k in range(args.window.bit_length())]
    edges = sorted({*edges, *(round(1.5 * edge) for edge in edges[3:-1]), args.window + 1} - {args.window})
    args.output.mkdir(parents=True, exist_ok=True)
    model = make_model(args)
    results = {
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "torch": torch.__version__,
        "paths": paths(torch.device(args.device)),
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_tokens_available": len(text.training),
        "arguments": {key: str(value) for key, value in vars(args).items()},
        "arms": {},
    }

    def record(name: str, training: dict[str, float]) -> None:
        loss, short = evaluate(model, text.windows, edges, args.length)
        perplexity, expected = by_octave(loss), by_octave(short)
        results["arms"][name] = {
            "training": training,
            "by_octave": perplexity,
            "by_octave_in_a_short_context": expected,
            "starts": loss.starts,
            "ends": loss.ends,
            "perplexity": loss.perplexity,
            "standard_errors_of_nll": loss.standard_errors,
            "over_minimum": {p: degradation(perplexity, p) for p in (4096, args.window) if p <= args.window},
            "over_short_context": {start: perplexity[start] / expected[start] for start in perplexity},
        }
        (args.output / "results.json").write_text(json.dumps(results, indent=1))
        over = results["arms"][name]["over_short_context"]
        print(
            f"{time.perf_counter() - began:.0f} s {name}: {training}; over the minimum "
            f"{ {p: round(v, 3) for p, v in results['arms'][name]['over_minimum'].items()} }; over a short context "
            f"{ {p: round(v, 3) for p, v in over.items() if p >= args.length} }",
            flush=True,
        )

    def states(kind: str, seed: int) -> InitialStates:
        return make_initial_states(ARMS[kind], model.config, device=torch.device(args.device), seed=seed)

    fresh = text.shuffled(args.seed)
    for _ in range(args.pretrain_rounds):
        record("base", train(model, fresh, states("zero", 0), rate=args.rate, seconds=args.pretrain_seconds))
        over = results["arms"]["base"]["over_short_context"]
        if over[max(start for start in over if 2 * start <= args.degraded_at)] >= args.degraded_by:
            break
    else:
        raise SystemExit(f"at {args.degraded_at} tokens the model does not degrade by a factor of {args.degraded_by}")
    base = {name: value.clone() for name, value in model.state_dict().items()}
    steps = args.steps
    for arm in args.arms:
        model.load_state_dict(base)
        batches = text.in_order(args.seed) if arm == "tbtt" else text.shuffled(args.seed + 1)
        trained = train(
            model,
            batches,
            states(arm, args.seed),
            rate=args.rate * args.arm_rate,
            seconds=args.arm_seconds,
            steps=steps,
        )
        steps = steps or trained["steps"]
        record(arm, trained)
    print(table(results, args.length))
    plot(results, args.length, args.output / "perplexity.png")


def table(results: dict, length: int) -> str:
    """Perplexity by octave of positions, and its ratio to a short context's on the same tokens, as Markdown."""
    arms = results["arms"]
    octaves = [start for start in next(iter(arms.values()))["by_octave"] if start >= min(64, length)]
    lines = [f"| position | {' | '.join(arms)} |", f"|---|{'---|' * len(arms)}"]
    for start in octaves:
        values = " | ".join(
            f"{arm['by_octave'][start]:.2f} ({arm['over_short_context'][start]:.3f})" for arm in arms.values()
        )
        lines.append(f"| {start:,} to {2 * start - 1:,} | {values} |")
    return "\n".join(lines)


def plot(results: dict, length: int, path: Path) -> None:
    """Draw, for each arm, perplexity by position (as the paper's Fig. 5) and its ratio to a short context's."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    for number, (name, arm) in enumerate(results["arms"].items()):
        style = {"color": "0.4", "linewidth": 2.5} if name == "base" else {"color": f"C{number - 1}", "linewidth": 1.5}
        for axes, key in zip(panels, ("by_octave", "over_short_context"), strict=True):
            shown = {int(start): value for start, value in arm[key].items() if int(start) >= length // 4}
            centres = [start * math.sqrt(2) for start in shown]
            axes.plot(centres, list(shown.values()), marker=".", label=name.replace("_", " "), **style)
    panels[0].set_ylabel("perplexity")
    panels[1].set_ylabel(f"perplexity / that after {length} to {2 * length - 1} tokens")
    panels[1].axhline(1, color="0.8", linewidth=1, zorder=0)
    panels[1].legend(frameon=False)
    for axes in panels:
        axes.axvline(length, color="0.7", linestyle=":")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.set_xlabel("position (tokens; dotted: training length)")
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=100)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    part = commands.add_parser("tokenise", help="write the ids of text files as one array")
    part.add_argument("files", type=Path, nargs="+", help="text files, or folders of Python sources")
    part.add_argument("--output", type=Path, required=True)
    part = commands.add_parser("run", help="train and measure")
    part.add_argument("tokens", type=Path, help="what tokenise wrote")
    part.add_argument("--output", type=Path, required=True)
    part.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    part.add_argument("--shape", type=int, nargs=3, default=(256, 12, 128), metavar=("D_MODEL", "LAYERS", "D_STATE"))
    part.add_argument("--vocab-size", type=int, default=4096)
    part.add_argument("--time-steps", type=float, nargs=2, default=(1e-3, 1e-1), help="range of dt at the start")
    part.add_argument("--palimpsa-layers", type=int, nargs="*", default=[], help="layers that are Palimpsa layers")
    part.add_argument("--length", type=int, default=256, help="tokens of a training sequence")
    part.add_argument("--batch", type=int, default=128, help="sequences of a step")
    part.add_argument("--rate", type=float, default=3e-3, help="peak learning rate of the pretraining")
    part.add_argument("--arm-rate", type=float, default=0.1, help="that of the arms, as a fraction (paper: a tenth)")
    part.add_argument("--pretrain-seconds", type=float, default=60)
    part.add_argument("--pretrain-rounds", type=int, default=1, help="at most; fewer once the model degrades enough")
    part.add_argument("--degraded-at", type=int, default=4096, help="position that tells")
    part.add_argument("--degraded-by", type=float, default=1.2, help="perplexity there over that in a short context")
    part.add_argument("--arm-seconds", type=float, default=20)
    part.add_argument("--steps", type=int, help="of every arm; default: as many as the first does in its time")
    part.add_argument("--arms", nargs="+", choices=ARMS, default=["zero", "state_passing", "fitted_noise", "tbtt"])
    part.add_argument("--window", type=int, default=32768, help="tokens of an evaluated sequence")
    part.add_argument("--windows", type=int, default=24)
    part.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Do what the command line says."""
    args = parse(arguments)
    if args.command == "tokenise":
        tokenise(args.files, args.output)
    else:
        run(args)


if __name__ == "__main__":
    main()
