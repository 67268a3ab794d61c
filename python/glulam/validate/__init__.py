"""The work of `glulam validate`: compare every function of a bundle with torch, on this machine's GPU.

`trial` and `catalogue` define the calls of a function, `inputs` their tensors, `judge` when a result is right, and
`guards` the memory that must not be written. `child` tries one function, and `run` starts a process for each.
"""
