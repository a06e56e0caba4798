"""Triton on NVIDIA's GPUs, and how kernels are compiled; without it the modules of the kernels still import."""

import functools
from types import SimpleNamespace

import torch

# Arguments that grow with the sequence are not specialised on: a prompt of another length compiles nothing anew
GROWING = ("T", "TP", "NSEG", "dt_b", "ddt_b")

try:
    if torch.version.hip is not None:
        raise ImportError("the kernels hold instructions of NVIDIA's GPUs")
    import triton
    import triton.language as tl

    jit = functools.partial(triton.jit, do_not_specialize=GROWING)
except ImportError:
    triton, tl = None, SimpleNamespace(constexpr=None)

    def jit(function):
        """Leave the kernels as plain functions, which are not to be called."""
        return function
