"""All that knows Megatron-Core: a model of ours built with it, and its steps."""
