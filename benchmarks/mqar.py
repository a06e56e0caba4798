"""Train the paper's two-layer models on multi-query associative recall (sections 3.1 and 3.2, A.8).

    python benchmarks/mqar.py --output mqar --seeds 0 1 2 --rates 2.15e-3 4.64e-3 --minutes 2.5 --lengths 128 256 512

Mamba2 and Palimpsa-M (d_model 128, 8 heads of 32, 8 groups, state 16, vocabulary 8,192, b_scale 1), each with every
seed and learning rate, side by side on one device: a training step is one CUDA graph, and each model has a stream.
Writes `results.json` and the paper's Figs. 2 and 3 for these two models. Without `--minutes` every length takes
`--epochs` epochs of `--examples` examples, as in A.8; with it, as many steps as fit, which the results tell.

What the paper leaves open follows the authors' public code: AdamW with weight decay 0.1, a cosine to zero, batches of
128, no random filler, one group in the gated norm. Ours: the cosine starts anew at each length, behind a short warm-up;
gradients are clipped at norm 1; A_log, D and biases do not decay. bfloat16 autocast on CUDA, float32 elsewhere.
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")  # hardware queues: one for each stream, as far as they go

import torch
import torch.nn.functional as F
from torch import Tensor

from mqar_figures import plot_accuracy, plot_dynamics
from palimpsa_surgery.hf_models import PalimpsaMamba2Config, PalimpsaMamba2ForCausalLM
from palimpsa_surgery.stages.optimisation import parameters_by_treatment
from palimpsa_surgery.stages.synthetic import CURRICULUM, IGNORED, mqar
from palimpsa_surgery.surgery.layer_probe import probe_layers

VOCABULARY = 8192
LAYERS = {"Mamba2": [], "Palimpsa-M": [0, 1]}
"""Indices of the Palimpsa layers of each model."""
RATES = (1e-3, 2.15e-3, 4.64e-3, 1e-2)
"""The paper's learning rates."""
WARMUP = 50  # steps, at each length
EAGER = 3  # steps before a graph is captured, while kernels compile
TIMED = 20  # steps by which the number that fits is reckoned
TEST_SEED = 1 << 20  # beyond the training seeds
EVALUATED = 1 << 16  # tokens of a forward pass without gradients


def make_model(name: str, seed: int) -> PalimpsaMamba2ForCausalLM:
    """A model as in A.8, with random weights: A and dt are ramps over the heads, b_scale is 1."""
    torch.manual_seed(seed)
    config = PalimpsaMamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        num_hidden_layers=2,
        num_heads=8,
        head_dim=32,
        expand=2,
        state_size=16,
        n_groups=8,
        norm_group_size=256,
        initializer_range=0.1,  # Mamba2's; with 0.02 training waits much longer for its first right answer
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=0,
        eos_token_id=0,
        palimpsa_layers=LAYERS[name],
    )
    model = PalimpsaMamba2ForCausalLM(config)
    rates = torch.linspace(0.01, 0.16, config.num_heads)
    steps = torch.logspace(math.log10(0.001), math.log10(0.1), config.num_heads)
    with torch.no_grad():
        for layer in model.backbone.layers:
            layer.mixer.A_log.copy_(rates.log())
            layer.mixer.dt_bias.copy_(steps + torch.log(-torch.expm1(-steps)))  # softplus gives `steps` back
    return model


@dataclass(frozen=True)
class Examples:
    """Examples of one length, on a device."""

    input_ids: Tensor
    """`[examples, length]`."""
    answers: Tensor
    """`[examples, pairs]`: what every second token of the latter half should be followed by."""

    @classmethod
    def make(cls, count: int, length: int, seed: int, device: torch.device) -> "Examples":
        """Draw examples with a pair for every four tokens."""
        batch = mqar(count=count, length=length, seed=seed, vocab_size=VOCABULARY, random_filler=False)
        answers = batch.targets[:, length // 2 :: 2]
        if (answers == IGNORED).any():
            raise RuntimeError("a position that should be asked about is not")
        return cls(*(torch.from_numpy(part.astype("int64")).to(device) for part in (batch.input_ids, answers)))


def answer_logits(model: PalimpsaMamba2ForCausalLM, input_ids: Tensor) -> Tensor:
    """Logits where answers are due, `[batch, length / 4, vocabulary]`; the others are never formed."""
    # index_select, since the gradient of an embedding waits for the GPU, which a graph cannot
    embedded = model.backbone.embeddings.weight.index_select(0, input_ids.flatten())
    hidden = model.backbone(inputs_embeds=embedded.view(*input_ids.shape, -1), use_cache=False).last_hidden_state
    return model.lm_head(hidden[:, input_ids.shape[1] // 2 :: 2]).float()


def autocast(device: torch.device) -> torch.autocast:
    """bfloat16 on CUDA; without a cache of cast weights, which a graph would go on using."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False)


@torch.no_grad()
def accuracy(model: PalimpsaMamba2ForCausalLM, examples: Examples, device: torch.device) -> float:
    """Fraction of the answers that are right."""
    model.eval()
    rows = max(1, EVALUATED // examples.input_ids.shape[1])
    right = 0
    with autocast(device):
        for ids, answers in zip(examples.input_ids.split(rows), examples.answers.split(rows), strict=True):
            right += (answer_logits(model, ids).argmax(-1) == answers).sum().item()
    model.train()
    return right / examples.answers.numel()


@dataclass
class Run:
    """One model in training, and what is known of it."""

    name: str
    seed: int
    rate: float
    accuracies: dict[int, float] = field(default_factory=dict)
    """By length, after the training at that length."""
    history: list[dict] = field(default_factory=list)
    """While training: step, length, loss, accuracy, and mean log window and metaplasticity ratio of the layers."""

    def start(self, device: torch.device) -> None:
        """Make the model and its optimizer."""
        self.device, self.graph = device, None
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.model = make_model(self.name, self.seed).to(device).train()
        on_cuda = device.type == "cuda"
        self.rate_now = torch.zeros((), device=device)
        groups = [
            {"params": parameters, "weight_decay": 0.1 if treatment.decays else 0.0}
            for treatment, parameters in parameters_by_treatment(self.model).items()
            if treatment.rate is not None
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate_now, capturable=on_cuda, fused=on_cuda, foreach=False)
        self.parameters = [parameter for group in groups for parameter in group["params"]]

    def begin(self, examples: Examples, batch: int, steps: int) -> None:
        """Prepare for at most `steps` steps on these examples, shuffled anew in each epoch."""
        generator = torch.Generator().manual_seed(self.seed)
        count = len(examples.answers)
        laps = math.ceil(steps * batch / count)
        order = torch.cat([torch.randperm(count, generator=generator) for _ in range(laps)])
        self.examples, self.order = examples, order[: steps * batch].view(steps, batch).to(self.device)
        self.step = torch.zeros(1, dtype=torch.int64, device=self.device)
        self.losses = torch.zeros(steps, device=self.device)
        self.schedule = torch.empty(steps, device=self.device)
        self.plan(steps)
        _wait(self.device)  # whatever was written here is read on another stream

    def plan(self, steps: int) -> None:
        """Fill the learning rates of so many steps."""
        at = torch.arange(1, steps + 1, dtype=torch.float64)
        rates = self.rate * (at / WARMUP).clamp(max=1) * (1 + torch.cos(math.pi * (at - 1) / steps)) / 2
        self.schedule[:steps].copy_(rates)

    def train_step(self) -> None:
        """One step, all of it on the device: batch, learning rate, loss and step number are read and written there."""
        rows = self.order.index_select(0, self.step).flatten()
        self.rate_now.copy_(self.schedule.index_select(0, self.step).squeeze(0))
        answers = self.examples.answers.index_select(0, rows)
        with autocast(self.device):
            logits = answer_logits(self.model, self.examples.input_ids.index_select(0, rows))
        loss = F.cross_entropy(logits.flatten(0, 1), answers.flatten())
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        self.losses.index_copy_(0, self.step, loss.detach()[None])
        self.step.add_(1)

    def capture(self) -> None:
        """Take the step as a CUDA graph; the step itself does not run."""
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self.stream):
            self.train_step()
        self.graph = graph

    def advance(self) -> None:
        """Make one step; on CUDA on this model's own stream, and without waiting for it if there is a graph."""
        with torch.cuda.stream(self.stream):  # None on a CPU, where this does nothing
            if self.graph is None:
                self.train_step()
            else:
                self.graph.replay()

    def probe(self, step: int, length: int, tests: Examples, since: int) -> None:
        """Write down how the model does; `since` is the first step of this length whose loss is not yet averaged."""
        with autocast(self.device):
            layers = probe_layers(self.model, tests.input_ids)
        ratios = [layer.metaplasticity_ratio for layer in layers if layer.metaplasticity_ratio is not None]
        self.history.append(
            {
                "step": step,
                "length": length,
                "loss": self.losses[since : int(self.step)].mean().item(),
                "accuracy": accuracy(self.model, tests, self.device),
                "log_windows": [layer.mean_log_window for layer in layers],
                "metaplasticity_ratios": ratios,
            }
        )


def train_length(
    runs: list[Run], length: int, options: argparse.Namespace, device: torch.device, before: int, deadline: float
) -> dict:
    """Train all runs at one length, test them, and return what was done.

    Args:
        before: steps already made at shorter lengths.
        deadline: of `time.monotonic()`; the number of steps is chosen so that they end by then.
    """
    began = time.monotonic()
    seeds = dict.fromkeys(run.seed for run in runs)
    pools = {seed: Examples.make(options.examples, length, seed, device) for seed in seeds}
    tests = Examples.make(options.test_examples, length, TEST_SEED, device)
    few = Examples(tests.input_ids[: options.probed], tests.answers[: options.probed])
    steps = options.epochs * options.examples // options.batch
    for run in runs:
        run.begin(pools[run.seed], options.batch, steps)

    done = _advance(runs, min(EAGER, steps))
    if device.type == "cuda" and not options.eager:
        for run in runs:
            run.capture()
    done += _advance(runs, min(1, steps - done))
    started = time.monotonic()
    done += _advance(runs, min(TIMED, steps - done))
    timed = time.monotonic()
    _probe(runs, before + done, length, few, 0)
    if deadline < math.inf:
        now = time.monotonic()
        each = (timed - started) / TIMED + (now - timed) / options.probe_every
        steps = min(steps, done + max(0, int(0.97 * (deadline - now) / each)))
        for run in runs:
            run.plan(steps)
        _wait(device)
        print(f"length {length}: {each * 1e3:.1f} ms for a step of {len(runs)} models, {steps} steps", flush=True)
    while done < steps and time.monotonic() < deadline:
        since = done
        done += _advance(runs, min(options.probe_every - done % options.probe_every, steps - done))
        _probe(runs, before + done, length, few, since)
        if done % (10 * options.probe_every) == 0 or done == steps:
            now = ", ".join(f"{run.history[-1]['accuracy']:.2f}" for run in runs)
            print(f"  {time.monotonic() - began:5.1f} s, step {done}: {now}", flush=True)
    for run in runs:
        run.graph = None
        run.accuracies[length] = accuracy(run.model, tests, device)
    return {
        "length": length,
        "pairs": length // 4,
        "runs": len(runs),
        "planned_steps": steps,
        "steps": done,
        "epochs": done * options.batch / options.examples,
        "examples": options.examples,
        "batch": options.batch,
        "seconds": time.monotonic() - began,
    }


def _advance(runs: list[Run], steps: int) -> int:
    """Take all runs `steps` steps further, side by side, and wait for them; return `steps`."""
    for _ in range(steps):
        for run in runs:
            run.advance()
    _wait(runs[0].device)
    return steps


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _probe(runs: list[Run], step: int, length: int, tests: Examples, since: int) -> None:
    for run in runs:
        run.probe(step, length, tests, since)


def best_rates(runs: list[Run]) -> dict[str, float]:
    """Each model's learning rate of the highest accuracy, averaged over seeds and over the lengths trained at."""
    means: dict[str, dict[float, float]] = {}
    for (name, rate), group in itertools.groupby(
        sorted(runs, key=lambda run: (run.name, run.rate)), key=lambda run: (run.name, run.rate)
    ):
        scores = [score for run in group for score in run.accuracies.values()]
        means.setdefault(name, {})[rate] = sum(scores) / len(scores)
    return {name: max(rates, key=rates.get) for name, rates in means.items()}


def table(runs: list[Run], lengths: list[int]) -> str:
    """Accuracy by length of every model and learning rate: mean ± standard deviation over the seeds, as Markdown."""
    lines = ["| model | learning rate | seeds | " + " | ".join(f"L = {length}" for length in lengths) + " |"]
    lines.append("|---|---|---|" + "---|" * len(lengths))
    for name, rate in sorted({(run.name, run.rate) for run in runs}):
        group = [run for run in runs if (run.name, run.rate) == (name, rate)]
        cells = []
        for length in lengths:
            scores = torch.tensor([run.accuracies[length] for run in group if length in run.accuracies])
            spread = f" ± {scores.std():.3f}" if len(scores) > 1 else ""
            cells.append(f"{scores.mean():.3f}{spread}" if len(scores) else "-")
        lines.append(f"| {name} | {rate:g} | {len(group)} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Train, print the table, and write results and figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder for results.json and the figures")
    parser.add_argument("--models", nargs="+", choices=LAYERS, default=list(LAYERS))
    parser.add_argument("--lengths", type=int, nargs="+", default=[length for length, _ in CURRICULUM])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(8)), help="of weights and examples")
    parser.add_argument("--rates", type=float, nargs="+", default=list(RATES), help="peak learning rates")
    parser.add_argument("--examples", type=int, default=100_000, help="to train on, of each length")
    parser.add_argument("--test-examples", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20, help="at each length")
    parser.add_argument("--batch", type=int, default=128, help="examples a step")
    parser.add_argument("--minutes", type=float, default=math.inf, help="for all lengths; fewer steps if need be")
    parser.add_argument("--shares", type=float, nargs="+", help="of the minutes for each length; default: equal")
    parser.add_argument("--keep-best", action="store_true", help="keep only the best rates after the first length")
    parser.add_argument("--probe-every", type=int, default=50, help="steps between two looks into the models")
    parser.add_argument("--probed", type=int, default=64, help="test examples of such a look")
    parser.add_argument(
        "--device", type=torch.device, default=torch.device("cuda" if torch.cuda.is_available() else "cpu")
    )
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    options = parser.parse_args(arguments)
    shares = options.shares or [1.0] * len(options.lengths)
    if len(shares) != len(options.lengths) or min(shares) <= 0:
        parser.error("--shares needs a positive number for each of --lengths")
    for name in ("epochs", "examples", "test_examples", "batch", "probe_every", "probed"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1")
    if options.epochs * options.examples < options.batch:
        parser.error("--epochs times --examples must make one batch")

    device = options.device
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    start = time.monotonic()
    runs = [Run(*key) for key in itertools.product(options.models, options.seeds, options.rates)]
    print(f"{gpu}, torch {torch.__version__}; {', '.join(f'{r.name} {r.seed} {r.rate:g}' for r in runs)}", flush=True)
    for run in runs:
        run.start(device)
    live, phases, before = list(runs), [], 0
    options.output.mkdir(parents=True, exist_ok=True)
    for index, length in enumerate(options.lengths):
        deadline = start + 60 * options.minutes * sum(shares[: index + 1]) / sum(shares)
        phases.append(train_length(live, length, options, device, before, deadline))
        before += phases[-1]["steps"]
        if options.keep_best and index == 0:
            best = best_rates(live)
            live = [run for run in live if run.rate == best[run.name]]
        print(table(runs, options.lengths[: index + 1]), flush=True)
        _write(options, gpu, runs, phases)
    best = best_rates(live)
    chosen = [run for run in live if run.rate == best[run.name]]
    print(f"best learning rates: {', '.join(f'{name} {rate:g}' for name, rate in best.items())}")
    plot_accuracy([asdict(run) for run in chosen], options.lengths, options.output / "accuracy.png")
    plot_dynamics([asdict(run) for run in chosen], options.output / "dynamics.png")


def _write(options: argparse.Namespace, gpu: str, runs: list[Run], phases: list[dict]) -> None:
    record = {
        "device": gpu,
        "torch": torch.__version__,
        "options": {
            name: None if value == math.inf else value  # JSON has no infinity: None is no limit of time
            for name, value in vars(options).items()
            if name not in ("device", "output")
        },
        "phases": phases,
        "runs": [asdict(run) for run in runs],
    }
    (options.output / "results.json").write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
