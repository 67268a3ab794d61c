"""Problems drawn from the operators' declarations, compared with float64: what `make fuzz` does.

`declared` lists functions and options, `draw` draws a `problem`, `tensors` makes its arguments, `formulas` computes
expected results, `check` compares, and `loop` runs many problems and shrinks the failing ones. docs/fuzzing.md is for
users.
"""
