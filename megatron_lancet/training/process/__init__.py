"""How a training process ends: exit codes, signals, messages."""
