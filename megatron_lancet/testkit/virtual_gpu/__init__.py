"""What would a GPU do with what the code enqueues? Order and lifetimes, checked on tensors in the host's memory."""
