"""Published series: a system fitted on the anchors of each, its other rows projected.

From a CSV to what is judged, in this order:

    rows                            cells as they stand there, cleaned
    metric_names, metrics           what a row prints of its speed, as seconds per step
    models, shape; hardware         its model; its node and fabric
    choices, plan                   what it leaves open, and the row as a plan to simulate
    software, attention, context    what its software does otherwise than Megatron-Core
    step                            a plan simulated, at factors that multiply its times
    family, fit                     the factors that anchors ask for; a row projected with them
    search                          splits, micro-batches and chunks that are not printed
    judging, validation             one series judged; all of a file

`spread` stands apart: how far the steps of one run spread.
"""
