"""From torch.profiler's traces of an ordinary Megatron run to a profile, without torch and without Megatron.

events      the JSON of Kineto: nested host ops, messages, kernels, process groups, step markers
passes      the forward and backward passes of each micro-batch
forward     a forward pass, cut into the ops of its layers by the sequence of what runs
backward    a backward pass: each node of autograd belongs to the op that has its sequence number
kernels     the same on a GPU: a kernel belongs to what launched it
step        the spans of a step, as the profiler's own trace has them
facts       sizes of the model and the layout
links       the cost of messages from their sizes and durations
packing     what our ops do next to stock's
chunks      estimates for chunks, which a stock run does not have
profile     all of it together
"""
