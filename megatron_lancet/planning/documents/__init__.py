"""Documents of different lengths: what they cost, and how they are dealt to bins and cut into chunks."""
