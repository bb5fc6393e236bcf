"""Steps that a GPU replays as CUDA graphs, or that torch.compile compiles.

The rest of `decode` meets them in three places: a decoder and each proposer hold
`steps.StaticSteps` if they compile, `runner.make_runner` returns a runner whose `call` records, and
`runner.in_bucket` pads a proposal.
"""
