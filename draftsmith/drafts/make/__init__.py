"""Where a draft comes from: pruned from the target, or moved from a donor of another tokenizer."""
