"""Hugging Face folders (config.json and safetensors) of language models, to and from moeflow's `gpt` model.

families.py   config.json of each family <-> model and gate options, and what cannot be expressed
weights.py    names and layouts of tensors
folder.py     files
"""
