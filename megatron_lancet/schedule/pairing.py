"""The order of a backward and of the forward paired with it: whose turn it is, the same on every rank.

A forward is a sequence of *turns*, each of which ends in front of a wait for one of its messages, the last one at the
end of the forward. A backward is cut in the same way by its own waits. One of the two runs at a time:

    forward    │ turn 0 ──> launch │                │ wait, turn 1, launch │                     │ wait, turn 2 …
    backward                       │ head … launch  │                      │ wait, experts … launch │

Turn 0 (embedding, attention, router) comes first, so that its dispatch is on the wire during the backward of the head.
From there on, in front of each of its waits, the backward lets the forward run: its message is in flight meanwhile, and
the forward's next message is in flight while the backward continues. In front of the last wait the forward ends with
the model's head, and turn 0 of the following micro-batch runs too, where there is one: otherwise nothing would be on
the wire during the backward of the first layer. (Megatron's combined 1F1B pairs whole layers and has no such rule.)

Both runtime and simulator use :class:`PairedTurns`, so the run matches the plan.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class PairedTurns:
    """Says how many turns of a forward have run by each place of the backward paired with it.

    Places are numbered: 0 is the start of the backward, and p precedes its p-th wait, from 1.

    Attributes:
        num_forward_waits: messages that the forward waits for; it has one turn more.
        num_backward_waits: messages that the backward waits for.
    """

    num_forward_waits: int
    num_backward_waits: int

    def done_by(self, place: int) -> int:
        """Number of turns of the forward that have run when the backward goes on at ``place``."""
        assert place <= self.num_backward_waits
        if not self.num_backward_waits:
            return 1
        return 1 + place * self.num_forward_waits // self.num_backward_waits

    def begins_next(self, place: int) -> bool:
        """Whether turn 0 of the micro-batch after the forward's also runs at ``place``, behind the forward's end."""
        return 0 < place == self.num_backward_waits
