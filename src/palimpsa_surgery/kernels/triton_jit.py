"""Triton on NVIDIA's GPUs, and how kernels are compiled; without it the modules of the kernels still import."""

import functools
import hashlib
from types import SimpleNamespace

import torch

# Of custom ops: one for each copy of the kernels, so that exports and the package live in one process
NAMESPACE = "palimpsa_" + hashlib.sha1(__name__.encode()).hexdigest()[:10]

# What changes with the sequence, or with the heads that a launch takes, is not specialised on, so that another length
# compiles nothing anew: sizes and strides, and the addresses of what has one number for each head
OPTIONS = {
    "do_not_specialize": (
        *("T", "TP", "NSEG", "H", "HPG", "BATCH", "SHARES", "PART_ROWS", "dt_b", "ddt_b"),
        *("NT", "in_b", "in_t", "tail_b", "tail_d", "tail_k", "doc_b", "doc_t"),
    ),
    "do_not_specialize_on_alignment": (*("dt", "A", "prior", "skip", "doc", "ddt", "dA", "dprior", "dskip", "tail"),),
}

try:
    if torch.version.hip is not None:
        raise ImportError("the kernels hold instructions of NVIDIA's GPUs")
    import triton
    import triton.language as tl

    jit = functools.partial(triton.jit, **OPTIONS)
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)

    def jit(function):
        """Leave the kernels as plain functions, which are not to be called."""
        return function


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up; Triton's own takes 5 µs, which a launch waits for."""
    return -(-a // b)


def power_of_two(size: int) -> int:
    """The smallest that is not below it."""
    return 1 << (size - 1).bit_length()


def kernels_take(*tensors: torch.Tensor) -> bool:
    """Whether kernels for GPUs, which compute in float32, may run."""
    return all(v.is_cuda and v.dtype != torch.float64 for v in tensors)
