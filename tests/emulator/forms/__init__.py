"""Instruction families. Importing them registers their opcodes in `emitter.INSTRUCTIONS`."""

from . import compare, convert, copies, floats, integers, logic, memory, moves, synchronise, tensor_cores, warps

__all__ = ["compare", "convert", "copies", "floats", "integers", "logic", "memory", "moves", "synchronise",
           "tensor_cores", "warps"]  # fmt: skip
