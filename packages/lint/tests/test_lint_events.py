"""The events of a program: their order, and what stands around them."""

import ast

import pytest
from rule_examples import all_examples

from lockstep_lint.analysis.project import Project
from lockstep_lint.analysis.source import parse
from lockstep_lint.analysis.view import Analysis
from lockstep_lint.config import configure
from lockstep_lint.events.event import ArmBlock, CallBlock, LoopBlock, WithBlock
from lockstep_lint.events.run import runs
from lockstep_lint.runner import check_text


def events(text):
    """Each event of a script's first run, with the blocks around it."""
    project = Project([parse("example.py", text)])
    first = runs(Analysis(project).view(project.checked[0]))[:1]
    return [f"{event.kind} {' '.join(map(shown, event.path))}".strip() for run in first for event in run.events]


def shown(block):
    match block:
        case LoopBlock():
            return "loop"
        case ArmBlock():
            return ("" if block.when else "not ") + ast.unparse(block.node)
        case WithBlock():
            return f"with {ast.unparse(block.node)}"
        case CallBlock():
            return f"{block.function.name}()"
    return "handler"


SCRIPT = """
import torch

def main(model, loader, optimizer, rank):
    for batch in loader:
{body}
"""


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ("loss.backward(); optimizer.step()", ["backward loop", "step loop"]),
        ("if last: continue\noptimizer.step()", ["step loop not last"]),
        ("if not last: continue\noptimizer.step()", ["step loop last"]),
        (
            "if last: break\nelse: loss.backward()\noptimizer.step()",
            ["leave loop last", "backward loop not last", "step loop not last"],
        ),
        ("if a:\n    if b: continue\noptimizer.step()", ["step loop not a and b"]),
        (
            "if a: return\nif b: return\noptimizer.step()",
            ["leave loop a", "leave loop not a b", "step loop not a not b"],
        ),
        ("continue\noptimizer.step()", []),
        ("if a: continue\nelse: return\noptimizer.step()", ["leave loop not a"]),
        ("with torch.no_grad():\n    if a: continue\n    optimizer.step()", ["step loop with torch.no_grad() not a"]),
        ("a and optimizer.step()", ["step loop a"]),
        ("optimizer.step() if a else loss.backward()", ["step loop a", "backward loop not a"]),
        (
            "while a:\n    if b: break\n    loss.backward()\noptimizer.step()",
            ["leave loop loop b", "backward loop loop not b", "step loop"],
        ),
        ("try:\n    loss.backward()\nexcept E:\n    optimizer.zero_grad()", ["backward loop", "zero loop handler"]),
        ("for p in ps: p.grad = None", ["zero loop loop"]),
        ("def closure():\n    loss.backward()\noptimizer.step(closure)", ["backward loop closure()", "step loop"]),
    ],
)
def test_control_flow_is_one_fact(body, expected):
    assert events(SCRIPT.format(body="\n".join(f"        {line}" for line in body.split("\n")))) == expected


CALLED = """
import torch

class Base:
    def __init__(self, optimizer):
        self.optimizer = optimizer

    def run(self, loss, train=True):
        if not train:
            return
        self.update(loss)

    def update(self, loss):
        raise NotImplementedError

class Trainer(Base):
    def update(self, loss):
        loss.backward()
        self.optimizer.step()

def main(loss, optimizer):
    trainer = Trainer(optimizer)
    trainer.run(loss, train=False)
    trainer.run(loss)

if __name__ == "__main__":
    main()
"""


def test_a_call_passes_its_class_and_literals():
    around = "__name__ == '__main__' main() run() update()"
    assert events(CALLED) == [f"backward {around}", f"step {around}"]


class _Turned(ast.NodeTransformer):
    """Writes `if test: ...` at a loop's end as `if not test: continue`."""

    def visit_For(self, node):
        self.generic_visit(node)
        last = node.body[-1]
        if isinstance(last, ast.If) and not last.orelse:
            out = ast.If(ast.UnaryOp(ast.Not(), last.test), [ast.Continue()], [])
            node.body[-1:] = [ast.copy_location(out, last), *last.body]
        return node


class _Back(ast.NodeTransformer):
    """Writes `if test: continue` in a loop as `if not test:` around the rest."""

    def visit_For(self, node):
        self.generic_visit(node)
        for place, stmt in enumerate(node.body[:-1]):
            if isinstance(stmt, ast.If) and isinstance(stmt.body[0], ast.Continue) and not stmt.orelse:
                held = ast.If(ast.UnaryOp(ast.Not(), stmt.test), node.body[place + 1 :], [])
                node.body[place:] = [ast.copy_location(held, stmt)]
                break
        return node


def found(text):
    """Return the findings of a script: rules, and texts of lines that are no tests."""
    lines = [line.strip() for line in text.split("\n")]
    told = check_text(text, configure({}, "ALL", ""))
    return sorted((f.rule, lines[f.line - 1].partition("if ")[0]) for f in told)


@pytest.mark.parametrize("rewriter", [_Turned, _Back])
@pytest.mark.parametrize("text", all_examples("bad", "good"))
def test_a_guard_and_an_early_exit_give_the_same_findings(text, rewriter):
    tree = ast.parse(text)
    plain, turned = ast.unparse(tree), ast.unparse(ast.fix_missing_locations(rewriter().visit(tree)))
    if plain != turned:
        assert found(turned) == found(plain)
