"""Autotuned Triton kernels of other libraries, compiled on all cores at once instead of one configuration at a time."""

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

from triton.runtime._async_compile import AsyncCompileMode
from triton.runtime.autotuner import Autotuner


@contextmanager
def tuned_in_parallel() -> Iterator[None]:
    """Inside, a kernel that is called for the first time compiles all its configurations before they are compared."""
    run = Autotuner.run

    def compile_first(self: Autotuner, *args, **kwargs):
        if not self.cache and len(self.configs) > 1:
            with ThreadPoolExecutor(os.cpu_count()) as pool, AsyncCompileMode(pool, ignore_errors=True):
                self.warmup(*args, **{k: v for k, v in kwargs.items() if k != "warmup"})
        return run(self, *args, **kwargs)

    Autotuner.run = compile_first
    try:
        yield
    finally:
        Autotuner.run = run
