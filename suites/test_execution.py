"""What the path did = what its claim says it does, as seen from outside.

Tokens forwarded (counted at the embedding) show that the shared prompt was shared; weights, buffers, modes and random
state are untouched but for `.grad`. Guards against paths that are never entered, skipped steps and side effects. With
`objective` below it: the step that is compared is the step that was asked for.
"""


def test_execution_is_what_the_claim_says(evidence):
    evidence.require("execution")
