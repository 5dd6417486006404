"""Log-probs of every response token, and every discrete decision = full autograd's.

Guards against shifted labels, wrong positions, masks, temperatures, stale or polluted state, other experts or keys.
With the rungs below: the loss that is differentiated is the right one, at the right numbers.
"""


def test_forward_values_equal_full_autograd(evidence):
    evidence.require("forward")
