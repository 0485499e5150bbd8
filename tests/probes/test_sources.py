"""No absolute path leaves a run: not in positions, not in messages, not in what torch calls a file."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from costlab.probes.sources import OWN_BUCKETS, OWN_HOOKS, position, scrub, shorten, wrapped

CWD = Path("/srv/me/project")


@pytest.mark.parametrize(
    ("path", "line", "shown"),
    [
        ("/srv/me/project/model.py", 7, "model.py:7"),
        ("/srv/me/elsewhere/model.py", 7, "model.py:7"),
        ("/opt/venv/lib/python3.12/site-packages/lib/m.py", 7, "lib/m.py:7"),
        ("<eval_with_key>.2 from /srv/me/secret/llama.py:118 in forward", 4, "llama.py:118"),
        (
            "<eval_with_key>.7 from <eval_with_key>.2 from /srv/me/secret/a.py:3 in f:9 in g",
            4,
            "<eval_with_key>.2 from a.py:3 in f:9",
        ),
        ("<string>", 1, "<string>:1"),
        ("", 0, ""),
    ],
)
def test_positions_are_short(path: str, line: int, shown: str) -> None:
    assert position(path, line, CWD) == shown


def test_a_break_in_a_wrappers_hook_is_the_wrappers() -> None:
    fsdp = "/v/lib/python3.11/site-packages/torch/distributed/fsdp/_fully_shard/_fsdp_state.py"
    assert wrapped("print", ["/home/me/m.py"]) == "print"
    assert wrapped("print", []) == "print"
    assert wrapped("skipped", ["/home/me/m.py", fsdp]) == f"FSDP runs {OWN_HOOKS}"
    assert wrapped("x", ["/v/torch/nn/parallel/distributed.py"]) == f"DDP runs {OWN_HOOKS}"
    without_stack = "the function `disable` in file `/v/torch/_dynamo/decorators.py` should not be traced"
    assert OWN_HOOKS in wrapped(without_stack, [])


def test_torch_still_says_in_these_words_that_ddp_cuts_a_graph() -> None:
    import inspect

    from torch._dynamo.backends import distributed

    said = re.findall(r'"(.*intentional.*)"', inspect.getsource(distributed))
    assert said
    assert {wrapped(text, ["/home/me/m.py"]) for text in said} == {OWN_BUCKETS}


@pytest.mark.parametrize(
    "text", ["failed in /srv/me/secret/a.py", "<x> from /srv/me/secret/a.py:1 in f", "'/srv/me/a.py'"]
)
def test_messages_hold_no_absolute_path(text: str) -> None:
    assert "/srv" not in scrub(text, CWD)
    assert "/srv" not in shorten(text, CWD)
