"""What the kernels for Hopper are made of, in Gluon: one register of a lane at a time.

Every tensor is one 32-bit register of each thread; a pair of bfloat16 is an int32. What moves between lanes does so by
name, so the layouts of `mma.sync` are in the comments. With g = lane // 4 and c = lane % 4, accumulators and first
operands hold rows g, g + 8 and columns 2c, 2c + 1 (+ 8), second operands rows 2c, 2c + 1 (+ 8) and column g.
"""

import functools

from .triton_jit import OPTIONS

try:
    import triton.experimental.gluon.language as gl
    from triton.experimental import gluon

    jit = functools.partial(gluon.jit, **OPTIONS)
    # the name differs between Triton 3.6 to 3.8 and 3.9
    barrier = getattr(gl, "thread_barrier", None) or gl.barrier
    AVAILABLE = True
except (ImportError, AttributeError):  # no triton, or a version whose Gluon differs: the portable kernels run
    from types import SimpleNamespace

    gl, barrier, AVAILABLE = SimpleNamespace(constexpr=lambda value: value), None, False

    def jit(function):
        """Leave the kernels as plain functions."""
        return function


@jit
def shared_base(zero):
    """Address of the program's shared memory. The program has one allocation, so it begins there."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, global_smem; add.u32 $0, a, $1; }", "=r,r", [zero], gl.int32, is_pure=True, pack=1
    )


@jit
def load4(address):
    """Four float32 words from shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.f32 {$0, $1, $2, $3}, [$4];", "=f,=f,=f,=f,r", [address],
        (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def load4_bits(address):
    """Four words from shared memory as int32."""
    return gl.inline_asm_elementwise(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def load1(address):
    """A float32 word from shared memory."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], gl.float32, is_pure=False, pack=1)


@jit
def load2(address):
    """Two float32 words from shared memory."""
    return gl.inline_asm_elementwise(
        "ld.shared.v2.f32 {$0, $1}, [$2];", "=f,=f,r", [address], (gl.float32, gl.float32), is_pure=False, pack=1
    )


@jit
def load_transposed(address):
    """Four matrices of 8 × 8 bfloat16 from shared memory, of which lane 8 i + j names row j of the i-th.

    A lane gets rows 2 c and 2 c + 1 of column g.
    """
    return gl.inline_asm_elementwise(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {$0, $1, $2, $3}, [$4];", "=r,=r,=r,=r,r", [address],
        (gl.int32, gl.int32, gl.int32, gl.int32), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def load_scalar(address):
    """A float32 word from shared memory, for all threads."""
    return gl.inline_asm_elementwise("ld.shared.f32 $0, [$1];", "=f,r", [address], gl.float32, is_pure=False, pack=1)


@jit
def store4(address, v):
    """Four float32 words to shared memory."""
    gl.inline_asm_elementwise(
        "st.shared.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,r,f,f,f,f", [address, v[0], v[1], v[2], v[3]],
        gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def store2_bits(address, a, b):
    """Two words to shared memory."""
    gl.inline_asm_elementwise(
        "st.shared.v2.b32 [$1], {$2, $3}; mov.u32 $0, 0;", "=r,r,r,r", [address, a, b], gl.int32, is_pure=False, pack=1
    )


@jit
def store1(address, v):
    """A float32 word to shared memory."""
    gl.inline_asm_elementwise(
        "st.shared.f32 [$1], $2; mov.u32 $0, 0;", "=r,r,f", [address, v], gl.int32, is_pure=False, pack=1
    )


@jit
def copy_async(address, pointer, size: gl.constexpr):
    """8 or 16 bytes from global to shared memory."""
    if size == 8:
        gl.inline_asm_elementwise(
            "cp.async.ca.shared.global [$1], [$2], 8; mov.u32 $0, 0;", "=r,r,l", [address, pointer.to(gl.int64)],
            gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        gl.inline_asm_elementwise(
            "cp.async.cg.shared.global [$1], [$2], 16; mov.u32 $0, 0;", "=r,r,l", [address, pointer.to(gl.int64)],
            gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@jit
def load_global4_if(pointer, v, condition):
    """Four float32 from global memory where the condition holds, and otherwise v: nothing waits for them before use."""
    return gl.inline_asm_elementwise(
        "{ .reg .pred p; setp.ne.s32 p, $5, 0; @p ld.global.v4.f32 {$0, $1, $2, $3}, [$4]; }",
        "=f,=f,=f,=f,l,r,0,1,2,3", [pointer.to(gl.int64), condition, v[0], v[1], v[2], v[3]],
        (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1,
    )  # fmt: skip


@jit
def store_global4(pointer, v):
    """Four float32 to global memory."""
    gl.inline_asm_elementwise(
        "st.global.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,l,f,f,f,f",
        [pointer.to(gl.int64), v[0], v[1], v[2], v[3]], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def add_global4(pointer, v):
    """Add four float32 to those in global memory."""
    gl.inline_asm_elementwise(
        "red.global.add.v4.f32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0;", "=r,l,f,f,f,f",
        [pointer.to(gl.int64), v[0], v[1], v[2], v[3]], gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@jit
def add_global(pointer, v):
    """Add to a float32 in global memory: nothing waits for it. A thread's own additions come in their order."""
    gl.inline_asm_elementwise(
        "red.global.add.f32 [$1], $2; mov.u32 $0, 0;", "=r,l,f", [pointer.to(gl.int64), v], gl.int32, is_pure=False,
        pack=1,
    )  # fmt: skip


@jit
def warp_barrier():
    """What lanes of a warp have written is there for the others, and what they have read may be written."""
    gl.inline_asm_elementwise(
        "bar.warp.sync 0xffffffff; mov.u32 $0, 0;", "=r,r", [gl.to_tensor(0)], gl.int32, is_pure=False, pack=1
    )


@jit
def count_bits(v):
    """How many bits of an integer are set."""
    return gl.inline_asm_elementwise("popc.b32 $0, $1;", "=r,r", [v], gl.int32, is_pure=True, pack=1)


@jit
def highest_bit(v):
    """Number of the highest bit that is set."""
    return gl.inline_asm_elementwise("bfind.u32 $0, $1;", "=r,r", [v], gl.int32, is_pure=True, pack=1)


@jit
def thread_anew(zero):
    """The thread's number, read where it is needed: what is made of it takes no register elsewhere."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; mov.u32 a, %tid.x; add.u32 $0, a, $1; }", "=r,r", [zero], gl.int32, is_pure=False, pack=1
    )


@jit
def uniform(v):
    """An integer that is the same for all threads, so that ptxas knows it.

    Shuffles in a loop that depends on a number of which it does not know that are slow.
    """
    return gl.inline_asm_elementwise(
        "redux.sync.or.b32 $0, $1, 0xffffffff;", "=r,r", [v], gl.int32, is_pure=False, pack=1
    )


@jit
def wait_async(zero):
    """Wait for this thread's copies; a barrier must follow before other threads read them."""
    gl.inline_asm_elementwise("cp.async.wait_all; mov.u32 $0, $1;", "=r,r", [zero], gl.int32, is_pure=False, pack=1)


@jit
def reciprocal(x):
    """One instruction, 1 ulp."""
    return gl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], gl.float32, is_pure=True, pack=1)


@jit
def pack(low, high):
    """Two float32 as a pair of bfloat16."""
    return gl.inline_asm_elementwise(
        "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], gl.int32, is_pure=True, pack=1
    )


@jit
def low(pair):
    """The first of a pair, as float32."""
    return (pair << 16).to(gl.float32, bitcast=True)


@jit
def high(pair):
    """The second of a pair, as float32."""
    return (pair & -65536).to(gl.float32, bitcast=True)


@jit
def beyond(v):
    """What is left of v without its upper half, a bfloat16: exact, so never fused with the product that v may be."""
    return gl.inline_asm_elementwise(
        "{ .reg .b32 a; and.b32 a, $1, 0xffff0000; sub.rn.f32 $0, $1, a; }", "=f,f", [v], gl.float32, is_pure=True,
        pack=1,
    )  # fmt: skip


@jit
def cut(v):
    """v with 16 bits of its fraction's 24, which two bfloat16 hold."""
    return (v.to(gl.int32, bitcast=True) & -256).to(gl.float32, bitcast=True)


@jit
def upper(a, b):
    """The upper halves of two float32 as a pair of bfloat16, in a float32 register."""
    return gl.inline_asm_elementwise("prmt.b32 $0, $1, $2, 0x7632;", "=f,f,f", [a, b], gl.float32, is_pure=True, pack=1)


@jit
def from_lane(x, lane):
    """x of another lane of the warp."""
    return gl.inline_asm_elementwise(
        "shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=f,f,r", [x, lane], gl.float32, is_pure=True, pack=1
    )


@jit
def mma16(a0, a1, a2, a3, b0, b1, acc):
    """acc + a b, a [16, 16], b [16, 8]."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, "
        "{$10, $11, $12, $13};",
        "=f,=f,=f,=f,r,r,r,r,r,r,f,f,f,f", [a0, a1, a2, a3, b0, b1, acc[0], acc[1], acc[2], acc[3]],
        (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def mma8(a0, a1, b0, acc):
    """acc + a b, a [16, 8], b [8, 8]."""
    return gl.inline_asm_elementwise(
        "mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {$0, $1, $2, $3}, {$4, $5}, {$6}, {$7, $8, $9, $10};",
        "=f,=f,=f,=f,r,r,r,f,f,f,f", [a0, a1, b0, acc[0], acc[1], acc[2], acc[3]],
        (gl.float32, gl.float32, gl.float32, gl.float32), is_pure=True, pack=1,
    )  # fmt: skip


@jit
def scaled(v, factor):
    """A fragment times a factor."""
    return (v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor)
