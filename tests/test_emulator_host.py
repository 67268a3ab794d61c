"""Host functions that the emulator evaluates: integers, layouts, tensor maps and launch parameters."""

from __future__ import annotations

import struct

import pytest
from emulator.engines.tensor_maps import TensorMap
from emulator.faults import Fault
from emulator.host import Host

ALIASES = """!matrix = !cute.memref<bf16, gmem, align<16>, "(?,?{div=8}):(?{i64 div=8},1)">
!wide = !cute.memref<bf16, gmem, align<16>, "(?,?{div=8},7):(?{i64 div=8},1,?{i64 div=8})">
"""
CONFIG = (
    "cuda.launch_cfg.create<max_attrs = 17 : i32> (blockDim = (%c128_i32, %c1_i32, %c1_i32), dynamicSmemBytes = %smem, "
    "gridDim = ({grid}, %c1_i32, %c1_i32), stream = %arg2) : i32, i32, i32, i64, i32, i32, i32, !cuda.stream "
    "-> !cuda.launch_cfg<max_attrs = 17>"
)


def _host(body: str, grid: str = "%c1_i32", operands: str = "", types: str = "", more: str = "") -> Host:
    """Return a host function with a matrix and an i32 argument that launches `kernel`."""
    text = f"""{ALIASES}
  func.func @cutlass(%arg0: !matrix, %arg1: i32, %arg2: !cuda.stream) -> i32 attributes {{llvm.emit_c_interface}} {{
    %c1_i32 = arith.constant 1 : i32
    %c2_i32 = arith.constant 2 : i32
    %c128_i32 = arith.constant 128 : i32
    %smem = cute.kernel_smem_size @kernels::@kernel : i64
{body}
    %cfg = {CONFIG.format(grid=grid)}
{more}
    %r = cuda.launch_ex @kernels::@kernel<%cfg> ({operands}) {{a = #b<true>}} : !cuda.launch_cfg<max_attrs = 17>, ({types}) -> !cuda.result
    return %c1_i32 : i32
  }}
"""  # noqa: E501 - an operation is a line
    return Host("\n".join(line for line in text.splitlines() if line), {"kernel": 1000})


MATRIX = (0x1000, (5, 24), (32, 1))


def test_a_launch_takes_what_the_host_function_computes() -> None:
    body = """    %0 = arith.muli %arg1, %c2_i32 : i32
    %1 = arith.cmpi sgt, %0, %c128_i32 : i32
    %2 = scf.if %1 -> (i32) {
      scf.yield %c1_i32 : i32
    } else {
      %3 = arith.addi %0, %c1_i32 : i32
      scf.yield %3 : i32
    }
    %4 = arith.extsi %2 : i32 to i64"""
    cluster = "    cuda.launch_cfg.cluster_dim[%cfg] (%c2_i32, %c1_i32, %c1_i32) : !cuda.launch_cfg<max_attrs = 17>"
    host = _host(body, "%2", "%4, %arg1", "i64, i32", cluster)
    for given, wanted in ((10, 21), (100, 1), (-3, -5)):
        (launch,) = host.launches([MATRIX, given])
        assert launch[:5] == ("kernel", (wanted, 1, 1), (128, 1, 1), 1000, (2, 1, 1))
        assert launch.parameters == (struct.pack("<q", wanted), struct.pack("<i", given))


def test_integers_wrap_at_their_width() -> None:
    host = _host("    %0 = arith.muli %arg1, %arg1 : i32\n    %1 = arith.trunci %smem : i64 to i8", "%0", "%1", "i8")
    (launch,) = host.launches([MATRIX, 1 << 16])
    assert launch.grid[0] == 0 and launch.parameters == (bytes([1000 % 256]),)


def test_tensors_are_structs_of_what_their_types_leave_open() -> None:
    body = """    %lay = cute.get_layout(%arg0) : !matrix
    %0 = cute.get_shape(%lay) : (!cute.layout<"(?,?{div=8}):(?{i64 div=8},1)">) -> !cute.shape<"(?,?{div=8})">
    %e0, %e1 = cute.get_leaves(%0) : !cute.shape<"(?,?{div=8})">
    %i0 = cute.to_int_tuple(%e0) : !cute.shape<"?"> to !cute.int_tuple<"?">
    %tile = cute.make_tile() : () -> !cute.tile<"2:1">
    %shp = cute.ceil_div(%i0, %tile) : !cute.int_tuple<"?">, !cute.tile<"2:1">
    %1 = cute.get_scalars(%shp) : !cute.int_tuple<"?">"""
    (launch,) = _host(body, "%1", "%arg0", "!matrix").launches([MATRIX, 0])
    assert launch.grid[0] == 3
    assert launch.parameters == (struct.pack("<Qiiq", 0x1000, 5, 24, 32),)


ATOM = (
    "    %atom, %coord = cute_nvgpu.atom.make_non_exec_tiled_tma_load({view}, %s, %t) <{{kind = <sm_90_multicast> "
    'num_multicast = {share}}}> : (!matrix, !cute.composed_layout<"S<3,4,3> o 0 o (8,64):(64,1)">, !layout) '
    "-> (!cute_nvgpu.atom.non_exec_tiled_tma_load<sm_90_multicast, bf16, copy_bits = 65536, tma_gbasis = "
    '<"{basis}">, tma_format = BF16_RN>, !cute.coord_tensor<"(0,0)", "{shape}">)'
)


@pytest.mark.parametrize(("share", "rows"), [(1, 16), (2, 8)])
def test_a_tensor_map_describes_the_tensor(share: int, rows: int) -> None:
    """Innermost first; of a multicast, a CTA loads its share of the rows."""
    atom = ATOM.format(view="%arg0", share=share, basis="(64,16):(1@1,1@0)", shape="(?,?{div=8}):(1@1,1@0)")
    (launch,) = _host(atom, "%c1_i32", "%atom, %coord", "!a, !b").launches([MATRIX, 0])
    described, coordinates = launch.parameters
    found = TensorMap(described)
    assert (found.base, found.rank, found.size, found.swizzle) == (0x1000, 2, 2, 3)
    assert list(found.dims) == [24, 5] and list(found.strides) == [2, 64] and list(found.box) == [64, rows]
    assert len(described) == 128 and coordinates == struct.pack("<ii", 5, 24)


@pytest.mark.parametrize(("rows", "word"), [(5, 0x46512), (2048, 0x46512), (2049, 0x246512)])
def test_a_tensor_map_has_the_words_that_the_compiler_encodes(rows: int, word: int) -> None:
    """From 128 KiB between a tensor's first and last byte on, word 2 has one more bit."""
    atom = ATOM.format(view="%arg0", share=1, basis="(64,16):(1@1,1@0)", shape="(?,?{div=8}):(1@1,1@0)")
    matrix = (0x1000, (rows, 24), (32, 1))
    (launch,) = _host(atom, "%c1_i32", "%atom, %coord", "!a, !b").launches([matrix, 0])
    words = struct.unpack("<32I", launch.parameters[0])
    assert words[:4] == (0x1000, 0, word, 4) and words[8:10] == (23, rows - 1) and words[13:15] == (63 << 24, 15)


def test_modes_of_a_nested_view() -> None:
    body = """    %iter = cute.get_iter(%arg0) : !matrix
    %shape = cute.make_shape(%arg1, %c2_i32) : (i32, i32) -> !cute.shape<"((32,?),?)">
    %stride = cute.make_stride(%arg1) : (i32) -> !cute.stride<"((8,?),1)">
    %lay = cute.make_layout(%shape, %stride) : !cute.layout<"((32,?),?):((8,?),1)">
    %view = cute.make_view(%iter, %lay) : !wide
"""
    atom = ATOM.format(view="%view", share=1, basis="(64,32,2):(1@1,1@0@0,1@1@0)", shape="((32,?),?):((1,1),1)")
    (launch,) = _host(body + atom, "%c1_i32", "%atom, %coord", "!a, !b").launches([MATRIX, 16])
    found = TensorMap(launch.parameters[0])
    assert list(found.dims) == [2, 32, 16] and list(found.strides) == [2, 16, 32] and list(found.box) == [64, 32, 2]
    assert launch.parameters[1] == struct.pack("<ii", 16, 2)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    %0 = arith.bogus %arg1, %arg1 : i32", "no operation arith.bogus"),
        ("    %0 = cute.bogus(%arg0) : !matrix", "no operation cute.bogus"),
        ('    cute.print("Error: too much", %smem) : i64', "the host function complains: .*too much"),
    ],
)
def test_what_is_unknown_or_wrong_is_a_fault(body: str, message: str) -> None:
    with pytest.raises(Fault, match=message):
        _host(body).launches([MATRIX, 0])


def test_a_call_has_all_arguments() -> None:
    with pytest.raises(Fault, match="1 arguments of 3"):
        _host("").launches([MATRIX])
