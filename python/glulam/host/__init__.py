"""State that the host keeps between calls: memory by device, stream and thread; tables, plans and settings.

* `device`: properties of GPUs, streams and captures, and the choice of an architecture.
* `workspace`, `tickets`: memory that launches reuse.
* `experts`: address tables for lists of experts' tensors.
* `groups`: group sizes (offs, splits) in every form that callers may pass.
* `plans`: finds kept plans (launches for calls of equal metadata) by the metadata of arguments.
* `invariance`: the switch for batch invariance.
"""
