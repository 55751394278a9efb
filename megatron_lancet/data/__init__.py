"""From a folder of text to Megatron's ``.bin``/``.idx`` datasets: what the tools in ``tools/`` share."""
