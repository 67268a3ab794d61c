"""The work of `glulam validate`: compare every function of a bundle with torch, on this machine's GPU.

A function is tried by calls of the public operators, called trials. `trial` defines a trial and `catalogue` lists the
trials of a function; `inputs` makes their tensors, `judge` decides when a result is right, and `guards` detects writes
beside the results. `child` tries one function, and `run` starts a process for each function.
"""
