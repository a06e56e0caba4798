"""Runs the Hopper kernels on the CPU: every register of every lane is an element of a numpy array.

The kernels of `hopper_read_out.py` and `hopper_gradients.py` see each tensor as one register of each thread, and what
moves between lanes moves in named instructions. Here those instructions are written down again, from the layouts in the
PTX manual ("Matrix Fragments for mma.m16n8k16" and m16n8k8), so that layouts, addresses and algebra are tested without
a GPU. Threads run in step, but shared memory refuses what depends on that: see `SharedMemory`.
"""

import importlib
import itertools
import sys
import types
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

import palimpsa_surgery.kernels


class Register(np.ndarray):
    """A register of each thread, with the methods of a Gluon tensor."""

    def to(self, dtype, bitcast=False):
        return np.ascontiguousarray(self).view(dtype).view(Register) if bitcast else self.astype(dtype)

    def __iadd__(self, other):
        return self + other

    def __imul__(self, other):
        return self * other


def register(values) -> Register:
    values = np.asarray(values)
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return values.view(Register)


class Pointer:
    """An address of each thread, or one of all, in elements of a tensor's storage."""

    def __init__(self, flat: torch.Tensor, offset):
        self.flat, self.offset = flat, offset

    def __add__(self, offset):
        return Pointer(self.flat, self.offset + np.asarray(offset, dtype=np.int64))


def pointer(tensor: torch.Tensor) -> Pointer:
    flat = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return Pointer(flat, np.int64(tensor.storage_offset()))


def load(address: Pointer, mask=True, other=0) -> Register:
    offset, mask = np.broadcast_arrays(address.offset, mask)
    if not mask.all():
        return Machine._where(mask, load(Pointer(address.flat, np.where(mask, offset, 0))), other)
    assert (offset >= 0).all()
    values = address.flat[torch.from_numpy(offset)]
    return register((values.float() if values.is_floating_point() else values).numpy())


def float_bits(values) -> np.ndarray:
    return np.ascontiguousarray(np.asarray(values, dtype=np.float32)).view(np.uint32)


def round_bfloat16(values) -> np.ndarray:
    """The upper half of the nearest bfloat16, as bits of a float32."""
    bits = float_bits(values).astype(np.uint64)
    return (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32)


def pack(low, high) -> Register:
    return register(((round_bfloat16(low) >> 16) | round_bfloat16(high)).view(np.int32))


def unpack(pair) -> tuple[np.ndarray, np.ndarray]:
    bits = np.ascontiguousarray(pair).view(np.uint32)
    return (bits << 16).view(np.float32), (bits & np.uint32(0xFFFF0000)).view(np.float32)


class SharedMemory:
    """Words of shared memory, and who has used each since the last barrier.

    What depends on the order of the threads is NaN: a word that was never written, that another thread has written
    since, or that is being copied. To write what another thread has written or read since, or what is being copied,
    fails.
    """

    NAN = np.uint32(0x7FC07FC0).view(np.float32)  # as a pair of bfloat16 too

    def __init__(self, words: int, threads: int):
        self.words = np.full(words, self.NAN)
        self.thread = np.arange(threads)
        self.copying = np.full(words, -1)  # the thread that has not waited for its copy yet
        self.barrier()

    def barrier(self):
        self.writer = np.full(self.words.size, -1)
        self.first_reader, self.last_reader = self.writer + self.thread.size + 1, self.writer.copy()
        self.writer_warp, self.reader_warp = self.writer.copy(), self.writer.copy()

    def warp_barrier(self):
        """The threads of each warp wait for each other: what they did before, their warp did, or several warps (-2)."""
        written, read = self.writer >= 0, self.last_reader >= 0
        self.writer_warp = np.where(written, self.writer // 32, self.writer_warp)
        warp = np.where(self.first_reader // 32 == self.last_reader // 32, self.last_reader // 32, -2)
        several = (self.reader_warp != -1) & (self.reader_warp != warp)
        self.reader_warp = np.where(read, np.where(several, -2, warp), self.reader_warp)
        self.writer[:] = self.last_reader[:] = -1
        self.first_reader[:] = self.thread.size

    def wait(self):
        """Each thread waits for its own copies."""
        self.writer = np.where(self.copying < 0, self.writer, self.copying)
        self.copying[:] = -1

    def read(self, address) -> np.ndarray:
        place, settled = self._place(address)
        np.minimum.at(self.first_reader, place, self.thread)
        np.maximum.at(self.last_reader, place, self.thread)
        return np.where(settled, self.words[place], self.NAN)

    def write(self, address, values, copy: bool = False):
        place, settled = self._place(address)
        assert settled.all(), "a word is written that another thread or copy writes"
        assert np.unique(place).size == place.size, "two threads write a word"
        for reader in (self.first_reader[place], self.last_reader[place]):
            unread = (reader < 0) | (reader == self.thread.size)
            assert (unread | (reader == self.thread)).all(), "a word is written that another thread may not have read"
        warp = self.reader_warp[place]
        assert ((warp == -1) | (warp == self.thread // 32)).all(), "a word is written that another warp may still read"
        (self.copying if copy else self.writer)[place] = self.thread
        self.words[place] = values

    def _place(self, address) -> tuple[np.ndarray, np.ndarray]:
        """The words at each thread's address, and whether each is what it is for every order of the threads."""
        place = np.broadcast_to(address // 4, self.thread.shape)
        assert (place >= 0).all()
        writer = self.writer[place]
        by_warp = (self.writer_warp[place] < 0) | (self.writer_warp[place] == self.thread // 32)
        return place, (self.copying[place] < 0) & ((writer < 0) | (writer == self.thread)) & by_warp


class Machine:
    """The threads of one program, its shared memory, and what stands in for Gluon and the instructions."""

    def __init__(self, threads: int, program: tuple[int, ...], grid: tuple[int, ...]):
        self.threads, self.program, self.grid = threads, program, grid
        self.warp, lane = np.divmod(np.arange(threads), 32)
        self.row, self.column = np.divmod(lane, 4)
        self.language = types.SimpleNamespace(
            constexpr=lambda value: value,
            float32=np.float32,
            int32=np.int32,
            int64=np.int64,
            BlockedLayout=lambda *_: None,
            SwizzledSharedLayout=lambda *_: None,
            allocate_shared_memory=self._allocate,
            arange=lambda start, end, layout: register(np.arange(start, end, dtype=np.int32)),
            program_id=lambda axis: register(np.int32(self.program[axis])),
            num_programs=lambda axis: register(np.int32(self.grid[axis])),
            minimum=lambda a, b: register(np.minimum(a, b)),
            maximum=lambda a, b: register(np.maximum(a, b)),
            cdiv=lambda a, b: register(-(-a // b)),
            where=self._where,
            exp=lambda v: register(np.exp(v)),
            to_tensor=lambda v: register(np.int32(v)),
            static_range=range,
            load=load,
            store=self._store,
        )

    def instructions(self) -> dict:
        """By the names that `hopper_lanes.py` gives them."""
        return {
            "gl": self.language,
            "barrier": lambda: self.shared.barrier(),
            "shared_base": lambda zero: zero,
            "load4": lambda address: tuple(v.view(np.float32) for v in self._words(address, 4)),
            "load4_bits": lambda address: self._words(address, 4),
            "load1": lambda address: register(self.shared.read(address)),
            "load_transposed": self._load_transposed,
            "cut": lambda v: register((float_bits(v) & np.uint32(0xFFFFFF00)).view(np.float32)),
            "load2": lambda address: tuple(v.view(np.float32) for v in self._words(address, 2)),
            "uniform": self._uniform,
            "count_bits": lambda v: int(v).bit_count(),
            "highest_bit": lambda v: int(v).bit_length() - 1,
            "thread_anew": lambda zero: register(np.arange(self.threads, dtype=np.int32)),
            "store2_bits": self._store2_bits,
            "store4": self._store4,
            "store1": lambda address, value: self.shared.write(address, value),
            "copy_async": self._copy_async,
            "load_global4_if": self._load_global4_if,
            "store_global4": self._store_global4,
            "add_global4": self._add_global4,
            "add_global": self._add_global,
            "warp_barrier": lambda: self.shared.warp_barrier(),
            "wait_async": lambda zero: self.shared.wait(),
            "reciprocal": lambda x: register(np.float32(1) / x),
            "pack": pack,
            "low": lambda pair: register(unpack(pair)[0]),
            "high": lambda pair: register(unpack(pair)[1]),
            "mma16": lambda a0, a1, a2, a3, b0, b1, acc: self._mma((a0, a1, a2, a3), (b0, b1), acc),
            "mma8": lambda a0, a1, b0, acc: self._mma((a0, a1), (b0,), acc),
            "load_scalar": self._scalar,
            "upper": self._upper,
            "beyond": lambda v: register(v - (float_bits(v) & np.uint32(0xFFFF0000)).view(np.float32)),
            "from_lane": lambda x, lane: register(x[32 * self.warp + lane % 32]),
        }

    @staticmethod
    def _where(condition, a, b):
        values = np.where(condition, a, b)
        integer = np.issubdtype(values.dtype, np.integer)
        return register(values.astype(np.int64).astype(np.int32) if integer else values)

    def _store(self, address: Pointer, value, mask=None):
        offset, value, mask = np.broadcast_arrays(address.offset, value, True if mask is None else mask)
        assert (offset[mask] >= 0).all()
        address.flat[torch.from_numpy(offset[mask])] = torch.from_numpy(value[mask]).to(address.flat.dtype)

    def _allocate(self, dtype, shape, layout):
        assert shape[1] == self.threads
        self.shared = SharedMemory(shape[0] * shape[1], self.threads)
        own = 4 * np.arange(self.threads)
        return types.SimpleNamespace(
            index=lambda row: types.SimpleNamespace(
                store=lambda value: self.shared.write(4 * row * self.threads + own, value)
            )
        )

    def _words(self, address, count):
        assert (address % (4 * count) == 0).all()
        read = (self.shared.read(address + 4 * i) for i in range(count))
        return tuple(register(np.ascontiguousarray(v).view(np.int32)) for v in read)

    def _load_transposed(self, address):
        assert (address % 16 == 0).all()
        found = []
        for i in range(4):
            values = []
            for k in range(2):  # rows 2 c and 2 c + 1 of column g, two to a word
                row = np.asarray(address)[32 * self.warp + 8 * i + 2 * self.column + k]
                word = np.ascontiguousarray(self.shared.read(row + self.row // 2 * 4)).view(np.uint32)
                values.append((word >> (16 * (self.row % 2)).astype(np.uint32)) & np.uint32(0xFFFF))
            found.append(register((values[0] | (values[1] << np.uint32(16))).view(np.int32)))
        return tuple(found)

    def _load_global4_if(self, address: Pointer, values, condition):
        assert (np.asarray(address.offset) % 4 == 0).all()
        return tuple(load(address + i, condition != 0, value) for i, value in enumerate(values))

    def _scalar(self, address):
        value = np.unique(self.shared.read(address))
        assert value.size == 1
        return register(value[0])

    @staticmethod
    def _upper(a, b):
        bits = (float_bits(a) >> 16) | (float_bits(b) & np.uint32(0xFFFF0000))
        return register(bits.view(np.float32))

    def _store4(self, address, values):
        assert (address % 16 == 0).all()
        for i, value in enumerate(values):
            self.shared.write(address + 4 * i, value)

    @staticmethod
    def _uniform(value):
        assert np.unique(value).size == 1
        return register(np.int32(np.ravel(value)[0]))

    def _store2_bits(self, address, a, b):
        assert (address % 8 == 0).all()
        for i, value in enumerate((a, b)):
            self.shared.write(address + 4 * i, np.ascontiguousarray(value).view(np.float32))

    def _copy_async(self, address, source: Pointer, size):
        assert (address % size == 0).all()
        assert (source.offset >= 0).all()
        assert (source.offset % (size // 4) == 0).all()
        for i in range(size // 4):
            words = source.flat[torch.from_numpy(np.asarray(source.offset + i))]
            self.shared.write(address + 4 * i, words.numpy().view(np.float32), copy=True)

    def _store_global4(self, address: Pointer, values):
        assert (np.asarray(address.offset) % 4 == 0).all()
        for i, value in enumerate(values):
            self._store(address + i, value)

    def _add_global4(self, address: Pointer, values):
        assert (np.asarray(address.offset) % 4 == 0).all()
        for i, value in enumerate(values):
            self._add_global(address + i, value)

    def _add_global(self, address: Pointer, value):
        assert np.unique(address.offset).size == self.threads, "two threads add to a word"
        address.flat[torch.from_numpy(address.offset)] += torch.from_numpy(np.asarray(value))

    def _mma(self, a, b, acc):
        depth = 8 * len(b)
        left = np.zeros((self.threads // 32, 16, depth), np.float32)
        for i, pair in enumerate(a):
            row, column = self.row + 8 * (i % 2), 2 * self.column + 8 * (i // 2)
            left[self.warp, row, column], left[self.warp, row, column + 1] = unpack(pair)
        right = np.zeros((self.threads // 32, depth, 8), np.float32)
        for i, pair in enumerate(b):
            row = 2 * self.column + 8 * i
            right[self.warp, row, self.row], right[self.warp, row + 1, self.row] = unpack(pair)
        product = left @ right
        places = ((self.row + 8 * (i // 2), 2 * self.column + i % 2) for i in range(4))
        return tuple(register(acc[i] + product[self.warp, *place]) for i, place in enumerate(places))


class Kernel:
    """Stands in for a kernel: `kernel[grid](*arguments)` runs its programs one after the other."""

    def __init__(self, function: Callable, modules: list):
        self.function, self.modules = function, modules

    def __getitem__(self, grid):
        def run(*arguments, num_warps, **constants):
            arguments = [pointer(v) if isinstance(v, torch.Tensor) else v for v in arguments]
            for program in itertools.product(*(range(size) for size in grid)):
                machine = Machine(32 * num_warps, program, grid)
                for module in self.modules:
                    for name, instruction in machine.instructions().items():
                        if hasattr(module, name):
                            setattr(module, name, instruction)
                self.function(*arguments, **constants)

        return run


def load_kernels() -> tuple[Kernel, Kernel]:
    """`read_out` and `segment_gradients`, loaded a second time, as on a machine without Gluon."""
    package = types.ModuleType("lane_machine_kernels")
    package.__path__ = [str(Path(palimpsa_surgery.kernels.__file__).parent)]
    present = sys.modules.get("triton.experimental")
    sys.modules |= {package.__name__: package, "triton.experimental": None}
    try:
        names = ("lanes", "scaled", "block", "token", "states", "gradients", "read_out")
        modules = [importlib.import_module(f"{package.__name__}.hopper_{name}") for name in names]
    finally:
        if present is None:
            del sys.modules["triton.experimental"]
        else:
            sys.modules["triton.experimental"] = present
    *_, gradients, read_out = modules
    functions = (read_out.read_out, gradients.segment_gradients)
    return tuple(Kernel(function, modules) for function in functions)
