"""The cost model and what is decided by it.  Uses the schema alone: no torch, so that it runs anywhere at once.

partition.py   layers -> pipeline stages of even cost
"""
