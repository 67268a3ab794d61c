"""What the host keeps beside calls, by device, stream and thread.

`device` asks the GPU; `workspace` and `tickets` have memory that launches reuse; `experts` has tables for lists of
tensors, `groups` group sizes in their forms; `plans` finds what was kept for arguments by their metadata.
"""
