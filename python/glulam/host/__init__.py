"""State that the host keeps between calls, by device, stream and thread.

`device` asks about the GPU; `workspace` and `tickets` keep memory that launches reuse; `experts` keeps tables for lists
of tensors; `groups` handles group sizes as they are given; `plans` finds kept objects by the metadata of arguments.
"""
