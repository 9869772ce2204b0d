"""Run `python -m lockstep ...`, and so `torchrun ... -m lockstep ...`."""

from lockstep.cli import main

if __name__ == "__main__":
    main()
