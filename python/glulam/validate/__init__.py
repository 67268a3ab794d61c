"""Every function of a bundle against torch, on the GPU at hand: what `glulam validate` does.

`trial` and `catalogue` say what is asked of a function, `inputs` on which tensors, `judge` when a result is right, and
`guards` where nothing may be written. `child` tries one function, and `run` starts a process for each.
"""
