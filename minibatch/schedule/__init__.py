"""How loops and branches run when lanes diverge.

A loop runs in `lockstep`, all lanes stepping until the last is done, or in `stages`, in which lanes that are done no longer
step; `select` runs every branch for all lanes, but for those branches that a `partition` runs for their own lanes. A lane that
sits out borrows what a lane that takes part was given, wherever a branch or step might else fail or not end on values that
were not meant for it. What a branch or step does beside computing it does for the lanes alone that take part (`live`).
`choose` says which schedule it is.
"""
