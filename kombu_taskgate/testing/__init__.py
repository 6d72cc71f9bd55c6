"""What tests of brokers need: a clock that is set, faults that are planned, and the contract suite.

Nothing outside tests imports this package.
"""
