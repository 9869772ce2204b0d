"""Data that a script divides among the ranks by hand, without a DistributedSampler."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Module
from lockstep_lint.analysis.kept import kept
from lockstep_lint.analysis.nodes import keyword

__all__ = ["divides", "parts"]

# The calls in which a rank's part is taken, and how such an expression reads.
CALLS = ("split", "chunk", "tensor_split", "array_split", "arange", "range", "shard", "split_dataset_by_node", "slice")
# Those of DGL, which know the rank themselves.
SPLITS = ("node_split", "edge_split")
RANK = r"[\w.]*(?:rank|get_rank\(\))"
COUNT = r"[\w.]*(?:world_size|num_replicas|nprocs|n_gpus|ngpus|get_world_size\(\))"
SLICE = rf"\[\s*{RANK}\s*::"
PART = re.compile(
    rf"(?:split|chunk)\([^\n]*\)\[{RANK}\]"
    rf"|{SLICE}|\brange\({RANK}, [^\n]*{COUNT}\)|\barange\({RANK}, [^\n]*{COUNT}"
    rf"|\.slice\({RANK}, [^\n]*{COUNT}\)|\.shard\([^\n]*{RANK}|\bsplit_dataset_by_node\("
    r"|\bdistributed\.(?:node|edge)_split\("
)
SHARD = re.compile(rf"\bshard_id={RANK}")


def divides(node: ast.AST) -> bool:
    """Whether an expression or a statement takes a rank's own part of something (`data[rank::world_size]`)."""
    return PART.search(ast.unparse(node)) is not None


@kept
def parts(module: Module) -> tuple[str, ...]:
    """The statements of a file that take a rank's own part of something, as text."""
    return tuple(dict.fromkeys(_parts(module)))


def _parts(module: Module) -> Iterator[str]:
    yield from (text for site in module.sites(*SPLITS) if PART.search(text := ast.unparse(site.stmt)))
    if "rank" not in module.text:
        return
    for site in module.sites(*CALLS):
        stmt = site.stmt
        if not isinstance(stmt, ast.If | ast.For | ast.While | ast.With | ast.Try) and any(
            "rank" in line or "split_dataset" in line for line in module.lines[stmt.lineno - 1 : stmt.end_lineno]
        ):
            text = ast.unparse(site.stmt)
            if PART.search(text):
                yield text
    if "shard_id" in module.text:
        texts = (ast.unparse(site.stmt) for site in module.sites() if keyword(site.call, "shard_id") is not None)
        yield from (text for text in texts if SHARD.search(text))
    for found in re.finditer(SLICE, module.text):
        start = module.text.rfind("\n", 0, found.start()) + 1
        yield module.text[start : found.end()]
