"""A tiny model, tokenizer and data set, and a run of verl's trainer on them: `verl-sharding demo`."""
