"""State that the host keeps between calls, by device, stream and thread.

`device` asks about the GPU; `workspace` and `tickets` keep memory that launches reuse; `experts` keeps tables for lists
of tensors; `groups` handles group sizes (offs, splits) in every form that callers may pass; `plans` finds kept plans
and other objects by the metadata of arguments; `invariance` has the switch for batch invariance.
"""
