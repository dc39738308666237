"""Attention modules of a model: found in the source of their class, and given a layer that runs packed prompts apart.

`dispatch` reads a class once, `scale` resolves the scaling argument on an instance, `find` lists a model's modules,
`layer` is what is attached.
"""
