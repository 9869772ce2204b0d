lockstep profile --steps 20 -- torchrun --standalone --nproc-per-node 2 plain.py
