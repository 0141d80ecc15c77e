"""Tests of the rig itself: the judge is judged too."""
