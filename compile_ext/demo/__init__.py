"""``compile-ext demo``: a small decoder, and a real checkpoint, through eager, torch.compile and
compile_ext.
"""
