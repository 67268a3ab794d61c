"""How every operator works: its public function and its launches are generated from the operator's parameters and its
`Call` class.

Read in this order: `front` writes the public function; `arguments` derives the meaning of parameters from their names;
`checks` and `memory` check arguments; `planning` and `launch` make the launch of a checked call; `call` handles calls
without a plan (a launch kept for calls of equal metadata); `addressed` has calls of kernels that take only addresses;
`autograd` has helpers of all backwards.
"""
