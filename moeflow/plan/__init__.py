"""The cost model and what is decided by it.  Uses the schema alone: no torch, so that it runs anywhere at once.

partition.py    layers -> pipeline stages of even cost
fit.py          measured seconds -> coefficients
profile.py      coefficients of a machine: defaults by device, or a file
cost.py         seconds of products, exchanges, broadcasts, reductions
layer_cost.py   seconds of one MoE layer, from who computes which rows
shadow.py       which experts to shadow in a step
replicas.py     hot experts on several ranks, and which rows go to which
replan.py       when new replicas pay
placement.py    which rank holds which experts, and when a move pays
overlap.py      into how many chunks to cut an exchange
balance.py      one step of one layer: replicas and shadows together
traces.py       recorded and synthetic routing
simulate.py     the model driven by a trace, to 100,000 ranks
cluster.py      description of a cluster
model_size.py   parameters and FLOPs of a model, from its configuration
memory.py       bytes of one rank
step_time.py    seconds of one step of a layout
layouts.py      all layouts that divide
search.py       layouts, ranked, with reasons
balance_study.py  what balancing would bring on a trace
"""
