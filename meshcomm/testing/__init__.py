"""For tests of programs that are parallel: assertions, and strategies for hypothesis.

``strategies`` needs hypothesis (``meshcomm[testing]``) and is imported by its own name:
``from meshcomm.testing import strategies``.
"""

from meshcomm.testing.equal import assert_parallel_equal, assert_training_equal

__all__ = ["assert_parallel_equal", "assert_training_equal"]
