"""A training step: schedule, prices, timeline, clocks, and the estimate of it all.

`estimate` simulates one. What it is made of, in the order in which it is needed:

    passes, sharding, shared_ports  what a stage runs for each microbatch, and its price
    updates, overlap                what it does once a step, and what of that is waited for
    pricing                         both for all stages, at a clock
    clocks                          the clock that the power cap leaves each stage
    pipeline_order                  the order of each stage's passes
    schedule, messages              what each pass waits for, as a graph
    timeline, composition           the graph executed: when each pass ends
    pipeline, queued                the priced step so executed; reductions that hold it up
    stragglers, scale               waiting for the slowest; errors that grow with the GPU count
    traffic, saturation             communication by kind; from which message on links bind

`message_turns` is what `messages` is in a program for Astra-Sim.
"""
