"""Choosing kernels: `choose` says which serves a problem.

Read in this order: `choice` asks the sources in turn; `known` has preferences and tuned tables, `table` their files;
`shipped` has what ships, `estimates` its times; `specs` the specs that users and files describe; `loadable` what can be
had without compiling; `records` files that anybody may have written.
"""

from .choice import Chooser, choose
from .shipped import Choice

__all__ = ["Choice", "Chooser", "choose"]
