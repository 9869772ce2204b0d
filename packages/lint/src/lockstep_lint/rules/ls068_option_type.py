"""LS068: `type=bool`, which makes every text True."""

import ast
import re
from collections.abc import Iterator

from lockstep_lint.analysis.index import Site
from lockstep_lint.analysis.nodes import constant, has_star, keyword
from lockstep_lint.analysis.view import View
from lockstep_lint.finding import Confidence, Severity
from lockstep_lint.rules.base import Found, Rule, at

PARSER = "argparse.ArgumentParser"
# Parsers of other packages that read `bool` as a flag.
OTHER_PARSERS = ("jsonargparse", "LightningCLI", "LightningArgumentParser", "from tap ", "import tap")


def check(view: View) -> Iterator[Found]:
    """Find options of argparse with `type=bool` that the program reads."""
    if "bool" in view.module.own_names or "bool" in view.module.imports:
        return
    for site in view.sites("add_argument"):
        call = site.call
        kind, name = keyword(call, "type"), destination(call)
        if name is None or not isinstance(kind, ast.Name) or kind.id != "bool":
            continue
        plain = keyword(call, "nargs") is None and keyword(call, "action") is None and not has_star(call)
        if plain and of_argparse(view, site) and is_read(view, name):
            yield at(site, f"type=bool makes every text True: `{flag(call)} False` turns '{name}' on")


def destination(call: ast.Call) -> str | None:
    """Return the attribute of the option that a call adds, if it is a literal."""
    dest = keyword(call, "dest")
    name = constant(dest) if dest is not None else flag(call).lstrip("-").replace("-", "_")
    return name if isinstance(name, str) and name.isidentifier() else None


def flag(call: ast.Call) -> str:
    """Return the flag by which a user gives an option."""
    texts = [text for text in map(constant, call.args) if isinstance(text, str)]
    return next((text for text in texts if text.startswith("--")), texts[0] if texts else "")


def is_read(view: View, name: str) -> bool:
    """Check whether a file of the program reads an option as it was given."""
    read = re.compile(rf"""\.{name}\b|["']{name}["']\s*[\],]""")
    replaced = re.compile(rf"""\.{name}\s*=[^=]""")
    texts = [member.text for member in view.project.family(view.module) if name in member.text]
    return any(read.search(text) for text in texts) and not any(replaced.search(text) for text in texts)


def of_argparse(view: View, site: Site) -> bool:
    """Check whether argparse reads the option from the command line, by its default parser."""
    texts = [member.text for member in view.project.family(site.module)]
    if any(word in text for text in texts for word in (*OTHER_PARSERS, "parse_args([]", "parse_args(args=[]")):
        return False
    if any(any(member.sites("register")) for member in view.project.family(site.module)):
        return False  # the parser may have learned to read `bool`
    origins = view.origins.of(site.receiver, site.scope) if site.receiver is not None else ()
    makers = [origin.call for origin in origins if origin.call is not None]
    if makers:
        return all(
            view.names.qualify(call.func, site.scope) == PARSER or "add_" in ast.unparse(call) for call in makers
        )
    return any("argparse" in text for text in texts)


RULE = Rule("LS068", Severity.ERROR, Confidence.HIGH, check, fix="unsafe")
