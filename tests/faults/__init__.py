"""Seeded faults: errors put into the product one at a time, which the checks must notice.

``test_python`` replaces names of the package, one for each promise of the docs; ``text`` puts a
fault into a function of C++, C, Metal or Swift by a few of its tokens. Each ``test_*.py`` is the
table of one area. They are marked ``faults`` and run by ``nox -s faults``.
"""
