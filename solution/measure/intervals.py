"""Arithmetic of sets of time: a set is a sorted list of disjoint intervals.

Sums of durations count nested and concurrent work several times; lengths of unions do not. All
operations are linear in the number of intervals, after sorting.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from operator import itemgetter

Intervals = list[tuple[float, float]]


def merged(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """Return the union of intervals in any order.

    >>> merged([(4, 6), (0, 2), (1, 3), (6, 7), (9, 9)])
    [(0, 3), (4, 7)]
    """
    union: Intervals = []
    for begin, end in sorted(intervals):
        if begin >= end:
            continue
        if union and begin <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], end))
        else:
            union.append((begin, end))
    return union


def intersection(a: Intervals, b: Intervals) -> Intervals:
    """Return what is in both sets.

    >>> intersection([(0, 4), (6, 9)], [(2, 7)])
    [(2, 4), (6, 7)]
    """
    common: Intervals = []
    i = j = 0
    while i < len(a) and j < len(b):
        begin, end = max(a[i][0], b[j][0]), min(a[i][1], b[j][1])
        if begin < end:
            common.append((begin, end))
        if a[i][1] < b[j][1]:
            i += 1
        else:
            j += 1
    return common


def difference(a: Intervals, b: Intervals) -> Intervals:
    """Return what is in `a` and not in `b`.

    >>> difference([(0, 4), (6, 9)], [(2, 7)])
    [(0, 2), (7, 9)]
    """
    edges = [float("-inf"), *(edge for hole in b for edge in hole), float("inf")]
    return intersection(a, list(zip(edges[::2], edges[1::2], strict=True)))


def clipped(a: Intervals, begin: float, end: float) -> Intervals:
    """Return what lies between `begin` and `end`; needs no pass over what lies outside.

    >>> clipped([(0, 4), (6, 9)], 3, 7)
    [(3, 4), (6, 7)]
    """
    first = bisect_right(a, begin, key=itemgetter(1))
    last = bisect_left(a, end, key=itemgetter(0))
    return [(max(one[0], begin), min(one[1], end)) for one in a[first:last]]


def length(a: Intervals) -> float:
    """Return the time that a set covers.

    >>> length([(0, 4), (6, 9)])
    7
    """
    return sum(end - begin for begin, end in a)
