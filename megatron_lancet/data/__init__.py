"""From a folder of text to Megatron's ``.bin``/``.idx`` datasets: code that the tools in ``tools/`` share."""
