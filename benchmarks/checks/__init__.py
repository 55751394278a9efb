"""What ``lancet check`` finds: known bugs of Megatron, and nothing in launches drawn at random."""
