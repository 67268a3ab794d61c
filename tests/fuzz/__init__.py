"""Problems drawn from the operators' declarations, compared with float64: what `make fuzz` does.

`declared` lists what there is to draw, `draw` draws a `problem`, `tensors` makes its arguments, `formulas` says what is
right, `check` decides, and `loop` runs many problems and shrinks those that fail. docs/fuzzing.md is for users.
"""
