"""Seeded faults: errors put into the product one at a time, which the checks must notice.

``test_python`` replaces names of the package, one for each promise of the docs; ``text`` puts a
fault into a few tokens of a function in C++, C, Metal or Swift. Each ``test_*.py`` has the faults
of one area. They are marked ``faults`` and run by ``nox -s faults``.
"""
