"""The parity runner: the same cases through every implementation, one table.

``python -m parity`` with tests/ and tests/lib on the import path. Rows are cases, columns are legs,
a cell is the worst error as a share of its tolerance.
"""
