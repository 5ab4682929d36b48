"""The report: what batching did to a program, and what to do about it.

`facts` looks on while the program is batched, `provenance` says why a value has lanes, `memory` how large a batch fits,
`findings` what is worth mending; `text` writes it all down.
"""
