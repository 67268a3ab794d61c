"""Kernel resources, parsed from ptxas' messages and the lowered host code."""

from __future__ import annotations

import pytest

from ffi_bridge.errors import CompileError
from ffi_bridge.resources import KernelResources, dynamic_smem, read_resources

LAUNCH = "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>"
HOST = f"""
  llvm.func @other() {{
    %8 = llvm.mlir.constant(7 : i64) : i64
  }}
  llvm.func @host(%arg0: !llvm.ptr) {{
    %8 = llvm.mlir.constant(512 : i64) : i64
    %9 = llvm.mlir.constant(230400 : i64) : i64
    %20 = llvm.getelementptr %14[0, 2] : (!llvm.ptr) -> !llvm.ptr, {LAUNCH}
    llvm.store %8, %20 : i64, !llvm.ptr
    %87 = llvm.mlir.addressof @kernels_first_0 : !llvm.ptr
    %88 = llvm.load %87 : !llvm.ptr -> !llvm.ptr
    %89 = llvm.call @_cudaLaunchKernelEx(%71, %88, %74) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
    %30 = llvm.getelementptr %15[0, 2] : (!llvm.ptr) -> !llvm.ptr, {LAUNCH}
    llvm.store %9, %30 : i64, !llvm.ptr
    %97 = llvm.mlir.addressof @kernels_second_1 : !llvm.ptr
    %98 = llvm.load %97 : !llvm.ptr -> !llvm.ptr
    %99 = llvm.call @_cudaLaunchKernelEx(%71, %98, %74) : (!llvm.ptr, !llvm.ptr, !llvm.ptr) -> i32
  }}
"""
# As a terminal gets it: coloured, and wrapped in the middle of the numbers.
REMARKS = """\x1b[96mremark[ptxas]:\x1b[0m ptxas detected register spills
          ptxas info    : (C7517) wgmma.wait_group is injected in around line 43 by compiler to allow use of
          registers defined by GMMA in function 'second_1'
          ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized
          due to insufficient register resources in the function 'second_1'
          ptxas info    : 0 bytes gmem
          ptxas info    : Compiling entry function 'second_1' for 'sm_90a'
          ptxas info    : Function properties for second_1
          ptxas         .     4880 bytes stack frame, 8484 bytes spill stores, 9024 bytes spill
          loads
          ptxas info    : Used 168 registers, used 1 barriers, 1024 bytes smem
          ptxas info    : Compiling entry function 'first_0' for 'sm_90a'
          ptxas info    : Function properties for first_0
          ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
          ptxas info    : Used 14 registers, used 0 barriers
"""


def test_reads_every_number_through_colours_and_wrapping() -> None:
    first, second = read_resources(["first_0", "second_1"], REMARKS, HOST)
    assert first == KernelResources("first_0", 14, 0, 0, 0, 512)
    assert second == KernelResources("second_1", 168, 8484, 9024, 1024, 230400, ("C7510", "C7517"))
    assert first.complaints == ()
    assert second.complaints == ("spills", "C7510", "C7517")
    assert second.describe("spills") == "spills (8484 bytes stored, 9024 loaded)"


def test_a_diagnostic_that_names_no_kernel_counts_against_all() -> None:
    remarks = REMARKS.replace(" in the function 'second_1'", "")
    first, second = read_resources(["first_0", "second_1"], remarks, HOST)
    assert first.diagnostics == ("C7510",)
    assert second.diagnostics == ("C7510", "C7517")


def test_the_largest_of_several_launches_counts() -> None:
    twice = HOST.replace("@kernels_second_1", "@kernels_first_0")
    assert dynamic_smem(twice) == {"first_0": 230400}


@pytest.mark.parametrize(
    ("remarks", "host", "lack"),
    [
        ("", HOST, "registers and spills"),
        (REMARKS.replace("spill stores", "stores"), HOST, "registers and spills"),
        (REMARKS.replace("registers", "r"), HOST, "registers and spills"),
        (REMARKS, "", "shared memory"),
        (REMARKS, HOST.replace("store %8", "store %arg0"), "shared memory"),
    ],
)
def test_no_report_is_an_error_not_a_clean_report(remarks: str, host: str, lack: str) -> None:
    with pytest.raises(CompileError, match=f"lacks the {lack} of first_0"):
        read_resources(["first_0"], remarks, host)
