"""The parity runner: the same cases through every implementation, one table.

Run ``python -m parity`` with tests/ and tests/lib on the import path. Rows are cases, columns are
legs, and a cell is the worst error as a share of its tolerance.
"""
