"""Writes small checkpoints in mamba_ssm's native format, and in the authors' meta_mamba2 format.

Written from mamba_ssm's own source and independent of the package under test: names, shapes and padding are
spelled out again here.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

ABSENT = object()
FORMATS = ("bin", "safetensors", "sharded-bin", "sharded-safetensors")


def native_config(changes: Mapping[str, object] | None = None) -> dict:
    """A tiny native config; `changes` maps names such as "ssm_cfg.ngroups" to values, or to ABSENT."""
    config = {
        "d_model": 32,
        "d_intermediate": 0,
        "n_layer": 2,
        "vocab_size": 61,
        "ssm_cfg": {"layer": "Mamba2", "d_state": 16, "headdim": 16},
        "attn_layer_idx": [],
        "attn_cfg": {},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "pad_vocab_size_multiple": 16,
        "tie_embeddings": True,
    }
    for name, value in (changes or {}).items():
        *parents, key = name.split(".")
        target = config["ssm_cfg"] if parents else config
        if value is ABSENT:
            del target[key]
        else:
            target[key] = value
    return config


def native_weights(config: dict, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Random weights of sensible sizes under native names."""
    draw = torch.Generator().manual_seed(seed)
    ssm = config["ssm_cfg"]
    d_model, d_state, d_conv = config["d_model"], ssm.get("d_state", 128), ssm.get("d_conv", 4)
    inner = d_model * ssm.get("expand", 2)
    heads = inner // ssm.get("headdim", 64)
    conv = inner + 2 * ssm.get("ngroups", 1) * d_state
    multiple = config.get("pad_vocab_size_multiple", 8)
    rows = -(-config["vocab_size"] // multiple) * multiple

    def normal(*shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        return mean + scale * torch.randn(*shape, generator=draw)

    weights = {"backbone.embedding.weight": normal(rows, d_model)}
    for layer in range(config["n_layer"]):
        prefix = f"backbone.layers.{layer}."
        weights[prefix + "norm.weight"] = normal(d_model, scale=0.1, mean=1)
        prefix += "mixer."
        weights[prefix + "dt_bias"] = normal(heads, mean=-1)
        weights[prefix + "A_log"] = normal(heads, scale=0.5, mean=-0.5)
        weights[prefix + "D"] = normal(heads, mean=1)
        weights[prefix + "in_proj.weight"] = normal(inner + conv + heads, d_model, scale=d_model**-0.5)
        weights[prefix + "conv1d.weight"] = normal(conv, 1, d_conv, scale=0.5)
        if ssm.get("conv_bias", True):
            weights[prefix + "conv1d.bias"] = normal(conv, scale=0.1)
        weights[prefix + "norm.weight"] = normal(inner, scale=0.1, mean=1)
        weights[prefix + "out_proj.weight"] = normal(d_model, inner, scale=inner**-0.5)
        if ssm.get("bias", False):
            weights[prefix + "in_proj.bias"] = normal(inner + conv + heads, scale=0.1)
            weights[prefix + "out_proj.bias"] = normal(d_model, scale=0.1)
    weights["backbone.norm_f.weight"] = normal(d_model, scale=0.1, mean=1)
    tied = config.get("tie_embeddings", True)
    weights["lm_head.weight"] = weights["backbone.embedding.weight"] if tied else normal(rows, d_model)
    weights = {key: value.to(dtype) for key, value in weights.items()}
    if tied:
        weights["lm_head.weight"] = weights["backbone.embedding.weight"]
    return weights


def write_weights(folder: Path, weights: dict[str, Tensor], form: str = "bin") -> None:
    """Write tensors in one of FORMATS; safetensors leave out a tied head, as they cannot share memory."""
    if "safetensors" in form:
        tied = weights.get("lm_head.weight") is weights.get("backbone.embedding.weight")
        weights = {key: value for key, value in weights.items() if not (tied and key == "lm_head.weight")}
        name, save = "model{}.safetensors", save_file
    else:
        name, save = "pytorch_model{}.bin", torch.save
    if not form.startswith("sharded"):
        save(weights, folder / name.format(""))
        return
    keys, weight_map = list(weights), {}
    for number, part in enumerate((keys[0::3], keys[1::3], keys[2::3]), start=1):
        file = name.format(f"-{number:05}-of-00003")
        save({key: weights[key].clone() for key in part}, folder / file)
        weight_map |= dict.fromkeys(part, file)
    index = {"metadata": {"total_size": sum(v.nbytes for v in weights.values())}, "weight_map": weight_map}
    (folder / f"{name.format('')}.index.json").write_text(json.dumps(index))


def write_native(
    folder: Path,
    changes: Mapping[str, object] | None = None,
    *,
    form: str = "bin",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Write a native checkpoint with these config changes into `folder`; return its weights."""
    config = native_config(changes)
    weights = native_weights(config, seed=seed, dtype=dtype)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, weights, form)
    return weights


def write_meta(folder: Path, *, n_groups: int = 2, seed: int = 0, **changes) -> dict[str, Tensor]:
    """Write a checkpoint as the authors' code does: meta_mamba2 config, importance parameters in all layers."""
    native = native_config({"ssm_cfg.ngroups": n_groups})
    weights = native_weights(native, seed=seed)
    weights["backbone.embeddings.weight"] = weights.pop("backbone.embedding.weight")
    draw = torch.Generator().manual_seed(seed + 1)
    hidden, inner, rank = 32, 64, 3
    for layer in range(2):
        prefix = f"backbone.layers.{layer}.mixer."
        weights[prefix + "b_rank_proj.weight"] = torch.randn(rank, hidden, generator=draw) * hidden**-0.5
        weights[prefix + "b_proj.weight"] = torch.randn(inner, rank, generator=draw)
        weights[prefix + "b_scale"] = torch.randn(4, generator=draw)
        weights[prefix + "Ip_log"] = torch.zeros(4)
    del weights["lm_head.weight"]
    config = {
        "architectures": ["MetaMamba2ForCausalLM"],
        "model_type": "meta_mamba2",
        "beta_step_rank": rank,
        "hidden_size": hidden,
        "head_dim": 16,
        "state_size": 16,
        "num_hidden_layers": 2,
        "n_groups": n_groups,
        "vocab_size": 64,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "fuse_cross_entropy": True,
        **changes,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_weights(folder, weights, "safetensors")
    return weights


def reference_logits(
    weights: dict[str, Tensor],
    input_ids: Tensor,
    *,
    n_groups: int = 1,
    norm_groups: int | None = None,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    metaplastic: bool = False,
) -> Tensor:
    """Mamba2, and Palimpsa where `metaplastic`, token by token in float64, from the equations.

    Args:
        weights: native or transformers' names.
        input_ids: [B, T].
        n_groups: groups that share B and C.
        norm_groups: groups of the gated norm, by default `n_groups`.
        dt_limit: limits of the time step after the softplus.
        metaplastic: use the importance parameters.

    Returns:
        [B, T, rows] float64.
    """
    w = {key.replace("embeddings.", "embedding."): value.double() for key, value in weights.items()}
    embedding = w["backbone.embedding.weight"]

    def rms(x: Tensor, groups: int = 1) -> Tensor:
        parts = x.unflatten(-1, (groups, -1))
        return (parts / (parts.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2)

    def silu(x: Tensor) -> Tensor:
        return x / (1 + torch.exp(-x))

    def softplus(x: Tensor) -> Tensor:
        return torch.log1p(torch.exp(x))

    residual = embedding[input_ids]
    batch, length, _ = residual.shape
    layer = 0
    while f"backbone.layers.{layer}.norm.weight" in w:
        p = {k.split(f"layers.{layer}.")[1]: v for k, v in w.items() if f"layers.{layer}." in k}
        u = rms(residual) * p["norm.weight"]
        p = {k.removeprefix("mixer."): v for k, v in p.items() if k.startswith("mixer.")}
        heads, inner = len(p["A_log"]), len(p["norm.weight"])
        conv_width, taps = p["conv1d.weight"].shape[0], p["conv1d.weight"].shape[-1]
        state_size = (conv_width - inner) // 2 // n_groups
        z, xBC, dt = (u @ p["in_proj.weight"].T + p.get("in_proj.bias", 0)).split([inner, conv_width, heads], -1)
        dt = softplus(dt + p["dt_bias"]).clamp(*dt_limit)
        alpha = torch.exp(-torch.exp(p["A_log"]) * dt)
        M = torch.zeros(batch, heads, inner // heads, state_size, dtype=torch.float64)
        importance = torch.zeros_like(M)
        outputs = []
        for t in range(length):
            convolved = p.get("conv1d.bias", torch.zeros(conv_width)) + sum(
                xBC[:, t - taps + 1 + j] * p["conv1d.weight"][:, 0, j] for j in range(taps) if t - taps + 1 + j >= 0
            )
            x, B, C = silu(convolved).split([inner, n_groups * state_size, n_groups * state_size], -1)
            x = x.reshape(batch, heads, -1)
            B, C = (v.reshape(batch, n_groups, -1).repeat_interleave(heads // n_groups, 1) for v in (B, C))
            step, decay = dt[:, t, :, None, None], alpha[:, t, :, None, None]
            M = decay * M + step * x[..., None] * B[:, :, None]
            if metaplastic:
                gate = 1 / (1 + torch.exp(-(u[:, t] @ p["b_rank_proj.weight"].T @ p["b_proj.weight"].T)))
                beta = gate.reshape(batch, heads, -1) * softplus(p["b_scale"])[:, None] * dt[:, t, :, None]
                importance = decay * importance + beta[..., None] * B.square()[:, :, None]
            prior = torch.exp(p["Ip_log"])[:, None, None] if metaplastic else 1.0
            y = (M / (prior + importance) * C[:, :, None]).sum(-1) + p["D"][:, None] * x
            outputs.append(y.reshape(batch, inner) * silu(z[:, t]))
        y = rms(torch.stack(outputs, 1), norm_groups or n_groups) * p["norm.weight"]
        residual = residual + y @ p["out_proj.weight"].T + p.get("out_proj.bias", 0)
        layer += 1
    return rms(residual) * w["backbone.norm_f.weight"] @ w.get("lm_head.weight", embedding).T
