"""The node agent: looks at every engine and device of a node once a second and tells the ledger what it saw.

Owns the reading of engines and devices, never a decision. Whatever cannot be read is None or ``unknown``;
nothing here turns a missing figure into a zero.
"""
