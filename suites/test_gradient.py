"""Every parameter's gradient = that of the claimed reference.

Guards against everything that leaves values alone and spoils a gradient: detached keys and values, a sweep that
misses a state, contributions lost or counted twice. With the rungs below: one step's gradient is the claimed one.
"""


def test_gradient_equals_the_claimed_reference(evidence):
    evidence.require("gradient")
