"""The order of ops as data: ops, plans and the rules that make them. Imports neither torch nor megatron."""
