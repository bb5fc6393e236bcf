"""Where a draft comes from: pruned from the target, moved from a donor of another tokenizer, or a
fresh shape.
"""
