"""How long would a GPU take for what the code enqueues? The log of a virtual GPU, played on a model of a device."""
