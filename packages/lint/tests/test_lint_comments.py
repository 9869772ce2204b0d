"""Words in comments, docstrings and idle imports neither silence a rule nor trigger it."""

import pytest
from rule_examples import examples

from lockstep_lint.analysis.index import bare, strip_comments
from lockstep_lint.config import Config, default_codes
from lockstep_lint.rules import RULES
from lockstep_lint.runner import check_text

WORDS = [
    "zero_grad grad = None set_epoch destroy_process_group SyncBatchNorm unscale_ no_sync set_device GradScaler",
    "'module.' worker_init_fn DistributedDataParallel DDP FSDP scaled_dot_product_attention builtins.print",
    "requires_grad_(False)",
    "sys.stdout = open setup_for_distributed 'LOCAL_RANK' accelerate manual_seed seed() eval()",
    "hasattr isinstance is_initialized",
    "deepspeed cuda gpu .grad convert_syncbn rank shard sampler world_size TORCH_NCCL find_unused_parameters",
    "barrier all_reduce",
    "pin_memory manual_backward is_causal",
]
COMMENT = "".join(f"# {line}\n" for line in WORDS)
DOCSTRING = '"""' + " ".join(WORDS) + '"""\n'
BAD = [(code, text) for code in RULES for text in examples(code, "bad")]


def found(code, text):
    return {f.rule for f in check_text(text, Config(default_codes() | {code}, frozenset({code})))}


@pytest.mark.parametrize(("code", "text"), BAD, ids=[f"{code}-{i}" for i, (code, _) in enumerate(BAD)])
def test_comments_and_docstrings_say_nothing(code, text):
    assert found(code, f"{DOCSTRING}{COMMENT}{text}{COMMENT}") == {code}
    inside = "\n".join(f"{line}  # {' '.join(WORDS)}" if line.strip() else line for line in text.split("\n"))
    assert found(code, inside) == {code}


@pytest.mark.parametrize("rule", list(RULES.values()), ids=list(RULES))
def test_they_find_nothing_either(rule):
    for text in examples(rule.code, "good"):
        assert found(rule.code, f"{DOCSTRING}{COMMENT}{text}{COMMENT}") == set()


def test_an_idle_import_is_no_wrapper():
    bad = RULES["LS031"].page.examples[0]
    assert found("LS031", "from torch.nn.parallel import DistributedDataParallel as DDP\n" + bad) == {"LS031"}
    assert found("LS031", bad.replace("dist.init", "print('use DDP here') or dist.init", 1)) >= {"LS031"}


def test_a_hash_in_a_string_is_no_comment():
    text = "x = '#1'  # two\ny = \"\"\"#3\n# four\"\"\"  # five\nz = f'{a}#' + r'\\#'\n"
    kept = "x = '#1'  \ny = \"\"\"#3\n# four\"\"\"  \nz = f'{a}#' + r'\\#'\n"
    assert strip_comments(text) == kept
    assert bare(text).count("\n") == text.count("\n")
    assert "four" not in bare(text)
