"""Find the options that the parsers of a program add, and what else gives their namespace an attribute."""

import ast
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field

from lockstep_lint.analysis.budget import kept
from lockstep_lint.analysis.calls import given
from lockstep_lint.analysis.index import Module, Scope, Site
from lockstep_lint.analysis.nodes import Words, constant, dotted, has_star, keyword, last
from lockstep_lint.analysis.origins import Origins

__all__ = ["Options"]

PARSER = "argparse.ArgumentParser"
# What options are called where they are handed on.
HOLDERS = Words(r"arg|opt|cfg|conf|hparams|hp$|flags|param|^a$|^p$", re.IGNORECASE)
# What may fill a namespace with names that are not written out.
FILLS = re.compile(
    r"__dict__\s*(\.\s*(update|setdefault)|\[[^\]\n]*\]\s*=(?!=)|\|?=(?!=))"
    r"|vars\([^)\n]*\)\s*(\.\s*(update|setdefault)|\[[^\]\n]*\]\s*=(?!=)|\|=)"
)
# A dictionary that is the namespace's own.
ALIAS = re.compile(r"(\w+)\s*=\s*(vars\(|[\w.]+\.__dict__)")
# What asks for a name by its text (`if "resume" in args`).
ASKED = re.compile(r"""["'](\w+)["']\s+(?:not\s+)?in\b""")
# A parser's method that is not called where it stands.
ALONE = re.compile(r"\.(add_argument|set_defaults)\b(?!\s*\()")
# What gives a parser, or a part of one.
MAKES = ("ArgumentParser", "add_argument_group", "add_mutually_exclusive_group", "add_subparsers", "add_parser")
# Functions of packages that may give options more attributes.
FILLERS = Words(r"^_*(init|setup|merge|fill|parse|process|validate|complete)", re.IGNORECASE)
HARMLESS = frozenset({"print", "len", "isinstance", "id", "type", "str", "repr", "pprint"})


@dataclass(eq=False)
class _Known:
    """The attributes that options may have; `open` where others may come from out of sight."""

    names: set[str] = field(default_factory=set)
    open: bool = False


class Options:
    """Answers which attributes the options of a program have."""

    def __init__(self, origins: Origins) -> None:
        self.origins = origins
        self.calls = origins.calls
        self.names = origins.names
        self.project = origins.project

    def missing(self, module: Module) -> Iterator[tuple[ast.Attribute, ast.stmt, Scope]]:
        """Yield the reads in a file of options that no parser adds, and that nothing else sets."""
        for scope in module.scopes:
            for node, stmt in scope.reads:
                read = isinstance(node.ctx, ast.Load) and not node.attr.startswith("_")
                if read and HOLDERS.search(last(node.value)) and self.lacks(node, scope):
                    yield node, stmt, scope

    def lacks(self, node: ast.Attribute, scope: Scope) -> bool:
        """Check whether an attribute is one of parsed options that cannot have it."""
        if node.attr in self.known(scope.module).names:
            return False
        parsed = self.parsed(node.value, scope)
        members = {scope.module, *(site.module for site in parsed)}
        known = [self.known(member) for member in members] if parsed else []
        return bool(known) and not any(each.open or node.attr in each.names for each in known)

    def parsed(self, node: ast.expr, scope: Scope) -> list[Site]:
        """Return the calls of `parse_args` that make a namespace; none where it may come from elsewhere."""
        found = []
        for origin in self.origins.of(node, scope):
            call = origin.call
            if call is None or last(call) != "parse_args" or not isinstance(call.func, ast.Attribute):
                return []
            if len(call.args) > 1 or call.keywords or not self.is_parser(call.func.value, origin.scope):
                return []
            found.append(Site(call, ast.Pass(), origin.scope, "parse_args", call))
        return found

    def is_parser(self, node: ast.expr, scope: Scope) -> bool:
        """Check whether a value is a parser of argparse, wherever it comes from."""
        made = self.origins.of(node, scope)
        full = (self.names.qualify(each.call.func, each.scope) if each.call is not None else "" for each in made)
        return bool(made) and all(name == PARSER for name in full)

    def switch(self, node: ast.Attribute, scope: Scope) -> bool:
        """Check whether an option is a switch (`action="store_true"`), so that programs run with and without it."""
        for site in self.parsed(node.value, scope):
            for member in self.project.family(site.module):
                for call in (each.call for each in member.sites("add_argument")):
                    switches = constant(keyword(call, "action")) in ("store_true", "store_false")
                    if switches and option_of([constant(arg) for arg in call.args]) == node.attr:
                        return True
        return False

    @kept
    def known(self, module: Module) -> _Known:
        """Return the attributes that the options of a file's programs may have."""
        known = _Known()
        for member in self.project.family(module):
            own = self.of_file(member)
            known.names |= own.names
            known.open |= own.open
        return known

    @kept
    def of_file(self, module: Module) -> _Known:
        """Return the attributes that one file may give to options."""
        known = _Known()
        known.names |= {
            key.rpartition(".")[2]
            for scope in module.scopes
            for key in scope.binds
            if "." in key and key.rpartition(".")[0] not in ("self", "cls")
        }
        known.names |= {*ASKED.findall(module.text)}
        known.open = FILLS.search(module.bare) is not None or ALONE.search(module.bare) is not None
        for alias, _ in ALIAS.findall(module.bare):
            known.open |= (
                re.search(rf"\b{alias}\s*(\.\s*(update|setdefault)|\[[^\]\n]*\]\s*=(?!=))", module.bare) is not None
            )
        for site in module.sites("add_argument", "add_subparsers", "set_defaults"):
            self.add(site, known)
        for site in module.sites("setattr", "hasattr", "getattr", "delattr"):
            name = constant(site.call.args[1]) if len(site.call.args) > 1 else None
            if isinstance(name, str):
                known.names.add(name)
            elif site.name == "setattr" and (not site.call.args or dotted(site.call.args[0]) not in ("self", "cls")):
                known.open = True
        known.open |= any(self.escapes(site) for site in module.sites())
        known.open |= any(map(self.inherits, module.sites("ArgumentParser", "add_parser")))
        return known

    def add(self, site: Site, known: _Known) -> None:
        """Note what a call of a parser's method adds."""
        call = site.call
        known.names |= {item.arg for item in call.keywords if item.arg and site.name == "set_defaults"}
        if has_star(call):
            known.open = True
        elif site.name in ("add_argument", "add_subparsers"):
            dest = keyword(call, "dest")
            name = constant(dest) if dest is not None else option_of([constant(arg) for arg in call.args])
            if isinstance(name, str):
                known.names.add(name)
            known.open |= not isinstance(name, str) and (site.name == "add_argument" or dest is not None)

    def escapes(self, site: Site) -> bool:
        """Check whether a call out of sight is handed a parser, which it may add to, or an unknown file options."""
        if site.name in HARMLESS or not (site.call.args or site.call.keywords):
            return False
        values = [*site.call.args, *(item.value for item in site.call.keywords)]
        made = [item for item in values if is_parser(item, site.scope)]
        if made:
            target = self.calls.target(site.call, site.scope)
            return target is None or self.hands_on(target, site.call, made)
        named = (dotted(site.call.func) or "").partition(".")[0]
        unseen = named in self.project.unseen(site.module)
        if not unseen and not (FILLERS.search(site.name) and self.is_foreign(site, named)):
            return False
        return any(isinstance(g, ast.Name | ast.Attribute) and HOLDERS.search(last(g)) for g in values)

    def hands_on(self, function: Scope, call: ast.Call, made: list[ast.expr]) -> bool:
        """Check whether a function hands a parser, that it has under another name, to code out of sight."""
        names = {name for name in function.params if given(call, function, name) in made}
        names = {name for name in names if not is_parser(ast.Name(name, ast.Load()), function)}
        return any(
            isinstance(value, ast.Name) and value.id in names and self.calls.target(site.call, function) is None
            for site in (function.sites if names else ())
            for value in (*site.call.args, *(item.value for item in site.call.keywords))
        )

    def is_foreign(self, site: Site, name: str) -> bool:
        """Check whether a call runs code of a package that is installed, neither Python's own nor torch's."""
        imported = site.module.imports.get(name)
        root = imported.module.partition(".")[0] if imported is not None else ""
        outside = bool(root) and root != "torch" and root not in sys.stdlib_module_names
        return outside and self.calls.target(site.call, site.scope) is None

    def inherits(self, site: Site) -> bool:
        """Check whether a parser is made of others (`parents=[base]`) that are out of sight."""
        parents = keyword(site.call, "parents")
        if parents is None:
            return False
        parts = parents.elts if isinstance(parents, ast.List | ast.Tuple) else [parents]
        return not all(self.is_parser(part, site.scope) for part in parts)


def option_of(words: list[object]) -> str | None:
    """Return the attribute of an option by the texts that name it (`"-b", "--batch-size"`)."""
    texts = [text for text in words if isinstance(text, str)]
    if not texts or len(texts) < len(words):
        return None
    first = next((text for text in texts if text.startswith("--")), texts[0])
    return first.lstrip("-").replace("-", "_") if first.startswith("-") else first


def is_parser(node: ast.expr, scope: Scope) -> bool:
    """Check whether a value may be a parser or a part of one, by its name or by what made it."""
    if isinstance(node, ast.Call):
        return last(node) in MAKES
    key = dotted(node)
    if key is None or "pars" in last(node).lower():
        return key is not None
    if "." in key:
        return key in held_parsers(scope.module)
    return key in parsers(scope) or key in parsers(scope.module.top)


@kept
def held_parsers(module: Module) -> frozenset[str]:
    """Return the attributes that a file gives parsers to (`self.parser`)."""
    return frozenset(name for scope in module.scopes for name in parsers(scope) if "." in name)


@kept
def parsers(scope: Scope) -> frozenset[str]:
    """Return the names that a function gives to parsers, or adds options to."""
    binds = [bind for found in scope.binds.values() for bind in found]
    made = {bind.key for bind in binds if isinstance(bind.value, ast.Call) and last(bind.value) in MAKES}
    filled = {dotted(site.receiver) or "" for site in scope.sites if site.name == "add_argument"}
    return frozenset(made | filled - {""})
