"""Everything that knows about ranks.

topology.py     process groups of a layout, each created once
collectives.py  the collectives, with autograd where it is needed
dispatcher.py   all-to-all of an MoE layer's rows over the expert-parallel group
shared_memory.py  the same between CPU ranks of one machine
parallelize.py  a model built as if alone -> this rank's part of it
gradients.py    reduction of gradients and their global norm
prepare.py      Accelerate: device, precision, accumulation
"""
