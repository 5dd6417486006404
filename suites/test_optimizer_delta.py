"""Parameters after optimizer steps on the same and on different problems = closed-form SGD and AdamW on the reference's gradients.

The second step shares a prompt with the first. Guards against state kept over an update, gradients that survive a step,
clipping by a wrong norm, factors that Adam would hide. With the rungs below: training moves as the reference would.
"""


def test_parameters_move_as_the_reference_would(evidence):
    evidence.require("optimizer_delta")
