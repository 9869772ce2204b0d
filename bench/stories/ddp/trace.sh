lockstep trace -o trace --steps 0:20 -- torchrun --standalone --nproc-per-node 2 plain.py
