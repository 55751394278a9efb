"""What a launch script would start: its command line, ranks and environment, without starting it."""
