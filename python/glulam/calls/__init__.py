"""The mechanism of every operator: what is generated from its parameters and from its class.

Read in this order: `front` writes the public function; `arguments` says what parameters mean, by their names, and
`checks` and `memory` what they must be; `planning` and `launch` make the launch of a checked call; `call` is what
happens where no plan serves; `addressed` has calls of kernels that take addresses alone; `autograd` what backwards
share.
"""
