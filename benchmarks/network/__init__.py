"""What overlap buys on a network that is really waited for: two ranks, one core each, a shaped link, no GPU."""
