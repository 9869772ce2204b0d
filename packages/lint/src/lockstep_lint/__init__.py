"""`lockstep lint PATH ...`: finds the mistakes of PyTorch training scripts without running them.

Apart from the rest of the package: it reads source text only, imports no torch and nothing else of lockstep.
"""
