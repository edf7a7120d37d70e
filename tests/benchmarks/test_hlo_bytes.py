"""Bytes of a compiled program: slices are read instead of arrays, updates written instead of all, and loops count."""

from __future__ import annotations

from benchmarks.hlo_bytes import kernels, size_of

PROGRAM = """
HloModule jit_step

%slicing (param_0: f32[6,1024], param_1: s32[]) -> f32[1024] {
  %param_0 = f32[6,1024]{1,0} parameter(0)
  %param_1 = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = f32[1,1024]{1,0} dynamic-slice(%param_0, %param_1, %zero), dynamic_slice_sizes={1,1024}
  %flat = f32[1024]{0} bitcast(%cut)
  ROOT %twice = f32[1024]{0} add(%flat, %flat)
}

%updating (param_0: f32[6,1024], param_1: f32[1024], param_2: s32[]) -> f32[6,1024] {
  %param_0 = f32[6,1024]{1,0} parameter(0)
  %param_1 = f32[1024]{0} parameter(1)
  %row = f32[1,1024]{1,0} bitcast(%param_1)
  %param_2 = s32[] parameter(2)
  %zero = s32[] constant(0)
  ROOT %kept = f32[6,1024]{1,0} dynamic-update-slice(%param_0, %row, %param_2, %zero)
}

%product (param_0: bf16[8,16], param_1: bf16[16,4]) -> bf16[8,4] {
  %param_0 = bf16[8,16]{1,0} parameter(0)
  %param_1 = bf16[16,4]{1,0} parameter(1)
  ROOT %dot = bf16[8,4]{1,0} dot(%param_0, %param_1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%body (carried: (s32[], f32[6,1024])) -> (s32[], f32[6,1024]) {
  %carried = (s32[], f32[6,1024]{1,0}) parameter(0)
  %number = s32[] get-tuple-element(%carried), index=0
  %stack = f32[6,1024]{1,0} get-tuple-element(%carried), index=1
  %read = f32[1024]{0} fusion(%stack, %number), kind=kLoop, calls=%slicing, metadata={op_name="jit(step)/while/add"}
  %write = f32[6,1024]{1,0} fusion(%stack, %read, %number), kind=kLoop, calls=%updating
  ROOT %next = (s32[], f32[6,1024]{1,0}) tuple(%number, %write)
}

ENTRY %main (x: bf16[8,16], w: bf16[16,4], start: (s32[], f32[6,1024])) -> bf16[8,4] {
  %x = bf16[8,16]{1,0} parameter(0)
  %w = bf16[16,4]{1,0} parameter(1)
  %start = (s32[], f32[6,1024]{1,0}) parameter(2)
  %loop = (s32[], f32[6,1024]{1,0}) while(%start), condition=%never, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %one = bf16[8,4]{1,0} fusion(%x, %w), kind=kCustom, calls=%product
  %other = (bf16[8,4]{1,0}, s8[4096]{0}) custom-call(%x, %w), custom_call_target="__cublas$gemm"
  ROOT %made = bf16[8,4]{1,0} get-tuple-element(%other), index=0
}
"""  # noqa: E501


def test_a_kernel_moves_what_it_reads_and_writes_as_often_as_its_loop_turns() -> None:
    found = {kernel.name: kernel for kernel in kernels(PROGRAM)}
    assert set(found) == {"read", "write", "one", "other"}
    assert (found["read"].times, found["read"].read, found["read"].written) == (6, 4096 + 4, 4096)
    assert (found["write"].times, found["write"].read, found["write"].written) == (6, 4096 + 4, 4096)
    assert found["read"].traced == "jit(step)/while/add"
    assert not found["read"].is_product


def test_a_product_is_one_in_a_fusion_and_in_a_library_whose_workspace_does_not_count() -> None:
    found = {kernel.name: kernel for kernel in kernels(PROGRAM)}
    for name in ("one", "other"):
        assert found[name].is_product
        assert (found[name].read, found[name].written) == (2 * (8 * 16 + 16 * 4), 2 * 8 * 4)


def test_bytes_of_a_shape_are_those_of_all_its_arrays() -> None:
    assert size_of("(f32[2,3]{1,0}, bf16[4], pred[])") == 24 + 8 + 1
