"""The instructions of every primitive of device/ptx.cuh: a slip of an order or a scope would be no error.

They are written down here as nvcc emits them for sm_90a, from the PTX ISA; registers have no names.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests.helpers.source_tree import ROOT, run

pytestmark = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not installed")

# By what is called; `p` points to global memory, `s` to shared memory.
GOLDEN: dict[str, tuple[str, ...]] = {
    # Plain access, never through a read-only cache but for what nobody writes.
    "out(load((const uint8_t*)p))": ("ld.u8 _, [_]",),
    "out(load((const uint16_t*)p))": ("ld.u16 _, [_]",),
    "out(load((const uint32_t*)p))": ("ld.u32 _, [_]",),
    "out(load((const uint64_t*)p))": ("ld.u64 _, [_]",),
    "out(load((const Bytes16*)p).words[3])": ("ld.v4.u32 {_, _, _, _}, [_]",),
    "out(load_constant((const uint8_t*)p))": ("ld.global.nc.u8 _, [_]",),
    "out(load_constant((const uint64_t*)p))": ("ld.global.nc.u64 _, [_]",),
    "store((uint8_t*)p, n)": ("st.u8 [_], _",),
    "store((uint16_t*)p, n)": ("st.u16 [_], _",),
    "store((uint32_t*)p, n)": ("st.u32 [_], _",),
    "store((uint64_t*)p, n)": ("st.u64 [_], _",),
    "store((Bytes16*)p, Bytes16{{n, n, n, n}})": ("st.v4.u32 [_], {_, _, _, _}",),
    "store_streaming((uint32_t*)p, n)": ("st.global.cs.u32 [_], _",),
    # Words that threads agree by.
    "out(load_relaxed<Scope::kDevice>((const uint32_t*)p))": ("ld.relaxed.gpu.u32 _, [_]",),
    "out(load_relaxed<Scope::kSystem>((const uint64_t*)p))": ("ld.relaxed.sys.u64 _, [_]",),
    "out(load_acquire<Scope::kBlock>((const uint32_t*)p))": ("ld.acquire.cta.u32 _, [_]",),
    "out(load_acquire<Scope::kDevice>((const uint32_t*)p))": ("ld.acquire.gpu.u32 _, [_]",),
    "out(load_acquire<Scope::kSystem>((const uint64_t*)p))": ("ld.acquire.sys.u64 _, [_]",),
    "store_relaxed<Scope::kDevice>((uint32_t*)p, n)": ("st.relaxed.gpu.u32 [_], _",),
    "store_relaxed<Scope::kSystem>((uint64_t*)p, n)": ("st.relaxed.sys.u64 [_], _",),
    "store_release<Scope::kDevice>((uint32_t*)p, n)": ("st.release.gpu.u32 [_], _",),
    "store_release<Scope::kSystem>((uint64_t*)p, n)": ("st.release.sys.u64 [_], _",),
    "out(add_acq_rel<Scope::kDevice>((uint32_t*)p, n))": ("atom.acq_rel.gpu.add.u32 _, [_], _",),
    "out(add_acq_rel<Scope::kSystem>((uint64_t*)p, n))": ("atom.acq_rel.sys.add.u64 _, [_], _",),
    "out(add_relaxed<Scope::kDevice>((uint32_t*)p, n))": ("atom.relaxed.gpu.add.u32 _, [_], _",),
    "out(load_shared((const uint32_t*)s))": ("ld.shared.u32 _, [_]",),
    "out(load_shared((const uint64_t*)s))": ("ld.shared.u64 _, [_]",),
    "out(load_shared((const Bytes16*)s).words[3])": ("ld.shared.v4.u32 {_, _, _, _}, [_]",),
    "out(add_shared((uint32_t*)s, n))": ("atom.relaxed.cta.add.u32 _, [_], _",),
    "fence<Scope::kBlock>()": ("fence.acq_rel.cta",),
    "fence<Scope::kDevice>()": ("fence.acq_rel.gpu",),
    "fence<Scope::kSystem>()": ("fence.acq_rel.sys",),
    # Block and warp: all lanes take part.
    "sync_block()": ("bar.sync 0",),
    "sync_warp()": ("bar.warp.sync -1",),
    "out(shuffle(n, 5))": ("shfl.sync.idx.b32 _|_, _, _, _, _",),
    "out(shuffle_xor(n, 1))": ("shfl.sync.bfly.b32 _|_, _, _, _, _",),
    "out(shuffle_up(n, 1))": ("shfl.sync.up.b32 _|_, _, _, _, _",),
    "out(ballot(n > 3))": ("vote.sync.ballot.b32 _, _, _",),
    "out(any(n > 3))": ("vote.sync.any.pred _, _, _",),
    "out(all(n > 3))": ("vote.sync.all.pred _, _, _",),
    "out(match_any(n))": ("match.any.sync.b32 _, _, _",),
    # Bulk copies.
    "fence_proxy_async()": ("fence.proxy.async",),
    "fence_proxy_async_shared()": ("fence.proxy.async.shared::cta",),
    "init_mbarrier((MBarrier*)s, 1)": ("mbarrier.init.shared::cta.b64 [_], _",),
    "fence_mbarrier_init()": (
        "fence.mbarrier_init.release.cluster",
        "fence.proxy.async.shared::cta",
    ),
    "arrive_expect((MBarrier*)s, n)": ("mbarrier.arrive.expect_tx.shared::cta.b64 _, [_], _",),
    "out(try_wait((MBarrier*)s, n))": (
        "mbarrier.try_wait.parity.shared::cta.b64 is_done, [_], _",
        "selp.u32 _, 1, 0, is_done",
    ),
    "bulk_load(s, p, n, (MBarrier*)s)": (
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [_], [_], _, [_]",
    ),
    "bulk_store(p, s, n)": ("cp.async.bulk.global.shared::cta.bulk_group [_], [_], _",),
    "commit_bulk_stores()": ("cp.async.bulk.commit_group",),
    "await_bulk_stores<1>()": ("cp.async.bulk.wait_group 1",),
    "await_bulk_reads<2>()": ("cp.async.bulk.wait_group.read 2",),
    # Arithmetic: rounded once, never fused, subnormals kept.
    "*(float*)p = add(multiply(f, f), f)": ("mul.rn.f32 _, _, _", "add.rn.f32 _, _, _"),
    "*(double*)p = add(multiply((double)f, (double)f), 3.0)": (
        "mul.rn.f64 _, _, _",
        "add.rn.f64 _, _, _",
    ),
    "*(float*)p = divide(f, 3.0f)": ("div.rn.f32 _, _, _",),
    "*(double*)p = divide((double)f, 3.0)": ("div.rn.f64 _, _, 0d4008000000000000",),
    "*(float*)p = half_to_float((uint16_t)n)": ("cvt.f32.f16 _, _",),
    "out(float_to_half(f))": ("cvt.rn.f16.f32 _, _",),
    # Time.
    "out(now_ns())": ("mov.u64 _, %globaltimer",),
    "pause(n)": ("nanosleep.u32 _",),
    "await_prerequisites()": ("griddepcontrol.wait",),
    "launch_dependents()": ("griddepcontrol.launch_dependents",),
}

# Code around a primitive: arguments, addresses, the result, and arithmetic in integers.
AROUND = re.compile(
    r"(ld\.param|st\.global\.(u32|u64|f32|f64)|cvta|cvt\.(u\d+|s\d+)\.|cvt\.f64\.f32|mov\.(u|b|f)\d+|setp|selp\.(u64|u32|s32|b16)"
    r"|and\.|or\.|add\.s|bra|ret|\$|shl|@|@!)"
)


def emitted(ptx: str) -> list[tuple[str, ...]]:
    """The instructions of each kernel, in order, without those that surround a primitive."""
    found = []
    for body in re.findall(r"\.entry k\d+\(.*?\n\{(.*?)\n\}\n", ptx, re.DOTALL):
        instructions: list[str] = []
        is_own = False
        for line in body.splitlines():
            if "inline asm" in line:
                is_own = "begin" in line
                continue
            text = re.sub(r"//.*", "", line).strip().removesuffix(";")
            # Braces around assembly are a line of their own, or hold what it declares.
            if text in ("{", "}"):
                continue
            text = re.sub(r"^\{ ?(?=\.reg)", "", text)
            text = re.sub(r"%(?!globaltimer)[a-z]+\d+", "_", text)
            text = re.sub(r"\s+", " ", text)
            if not text or text.startswith("."):
                continue
            if is_own or not AROUND.match(text):
                instructions.append(text)
        found.append(tuple(instructions))
    return found


def test_every_primitive_is_the_instruction_that_it_should_be(tmp_path: Path) -> None:
    kernels = "\n".join(
        f'extern "C" __global__ void k{i}(std::byte* p, uint32_t n, float f) {{ {call}; }}'
        for i, call in enumerate(GOLDEN)
    )
    source = tmp_path / "primitives.cu"
    source.write_text(
        '#include "device/ptx.cuh"\n'
        "namespace moe::device {\n"
        "#define s shared_memory()\n"
        # Target of the result of a load, so that it is one.
        "#define out(value) *reinterpret_cast<uint64_t*>(p) = static_cast<uint64_t>(value)\n"
        f"{kernels}\n}}\n"
    )
    target = tmp_path / "primitives.ptx"
    flags = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}")
    run("nvcc", *flags, "-arch=sm_90a", "-ptx", "-o", str(target), str(source))
    found = emitted(target.read_text(encoding="utf-8"))
    assert len(found) == len(GOLDEN)
    wrong = {
        call: instructions
        for (call, golden), instructions in zip(GOLDEN.items(), found, strict=True)
        if instructions != golden
    }
    assert wrong == {}


def test_a_launch_is_one_call_of_the_runtime(tmp_path: Path) -> None:
    source = tmp_path / "launch.cu"
    source.write_text(
        '#include "device/ptx.cuh"\n'
        "struct Params { int number; };\n"
        "__global__ void kernel(Params) {}\n"
        "void put(const moe::device::Launch& shape) {\n"
        "  moe::device::launch(&kernel, shape, Params{1});\n"
        "}\n"
    )
    target = tmp_path / "launch.o"
    flags = ("-std=c++20", "-O3", "--expt-relaxed-constexpr", f"-I{ROOT / 'csrc'}")
    run("nvcc", *flags, "-arch=sm_90a", "-c", "-o", str(target), str(source))
    called = set(re.findall(r"\bU (cuda\w+)", run("nm", "-u", str(target))))
    # The function that names an error is called only then; what kernels are registered with begins otherwise, and
    # nobody calls the stub of a kernel.
    of_errors = {"cudaGetErrorName", "cudaGetErrorString", "cudaGetLastError"}
    assert called - of_errors == {"cudaLaunchKernelExC"}


def test_no_primitive_is_left_out() -> None:
    text = (ROOT / "csrc/device/ptx.cuh").read_text(encoding="utf-8")
    with_assembly = set()
    for body in re.split(r"\n(?=MOE_DEVICE|template|inline)", text.split("// --- Thread")[1]):
        name = re.search(r"MOE_DEVICE [\w<>: ]+?[ *](\w+)\(", body)
        if name and re.search(r"asm|ptx::(plain|ordered)|__\w+\(", body):
            with_assembly.add(name[1])
    # These count and reinterpret bits.
    without_order = {"population", "first_bit", "float_bits", "bits_float", "shared_memory"}
    tested = {name for call in GOLDEN for name in re.findall(r"(\w+)(?:<[\w:]+>)?\(", call)}
    assert with_assembly - without_order - tested == set()
    assert len(with_assembly) > 30
