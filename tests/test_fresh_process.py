from __future__ import annotations

import pytest

from lsverify.fresh_process import in_fresh_process


def test_a_fresh_process_returns_json_and_sees_its_environment():
    assert in_fresh_process("os.path:join", "a", "b") == "a/b"
    assert in_fresh_process("os:getenv", "LSVERIFY_X", environment={"LSVERIFY_X": "1"}) == "1"
    assert in_fresh_process("json:dumps", [2, 1], sort_keys=True) == "[2, 1]"


def test_a_failure_in_a_fresh_process_is_reported():
    with pytest.raises(RuntimeError, match=r"os.path:join failed in its own process: TypeError"):
        in_fresh_process("os.path:join", 3)
