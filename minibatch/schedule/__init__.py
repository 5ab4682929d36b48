"""How loops and branches run when lanes diverge.

`select` runs every branch for all lanes, `lockstep` steps all lanes until the last is done. In both a lane that sits out
borrows what a lane that takes part was given, so that no branch and no step ever sees values that were not meant for it. What
a branch or step does beside computing it does for the lanes alone that take part (`live`).
"""
