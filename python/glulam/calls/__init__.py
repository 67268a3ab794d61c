"""The path from an operator's public function to its kernel. Both the function and the launch are generated code.

They are generated from the operator's parameters and its `Call` class. The first call with some metadata (shapes,
dtypes, strides, options) is checked, and makes a "plan": generated Python that launches the kernel. Later calls of
equal metadata only look up the plan and run it.

Read the files in this order: `front` writes the public function; `arguments` derives the meaning of parameters from
their names; `checks` and `memory` check arguments; `planning` and `launch` make the plan of a checked call; `call`
handles calls without a plan; `addressed` has calls of kernels that take only addresses; `autograd` has helpers of all
backwards.
"""
