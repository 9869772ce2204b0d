"""How much work a file may cost: the bound that keeps a hostile or generated file from holding up the rest."""

__all__ = ["WORK", "TooIntricate"]

# Steps up a syntax tree, calls looked at, values followed: about 2 s of them. Training scripts use a hundredth.
LIMIT = 1_000_000


class TooIntricate(Exception):
    """A file has used up its work; what was found until then stands."""


class Work:
    """The work that is left for the file being checked."""

    def __init__(self) -> None:
        self.left = LIMIT

    def start(self) -> None:
        """Gives the next file its share."""
        self.left = LIMIT

    def spend(self, amount: int = 1) -> None:
        """Takes away some work; raises TooIntricate when none is left."""
        self.left -= amount
        if self.left < 0:
            raise TooIntricate


# One for the process: files are checked one after the other, and every question of every rule draws on it.
WORK = Work()
