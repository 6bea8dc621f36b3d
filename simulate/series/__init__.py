"""Published series: a system fitted on the anchors of each, its other rows projected."""
