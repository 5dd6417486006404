"""Our objective, summed over responses = its batched form = the formulas by hand, in value and in gradient.

Both sides of every later comparison share this code, so a fault here would cancel in the difference: it is held to
outside oracles first. Guards against wrong denominators, advantages across groups, misplaced masks and clips.
"""


def test_objective_equals_its_oracles(evidence):
    evidence.require("objective")
