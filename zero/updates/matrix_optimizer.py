"""The base class of optimizers that update whole matrices."""

from zero.updates.matrix_method import MatrixMethod
from zero.updates.matrix_update import MatrixUpdate


class MatrixOptimizer(MatrixMethod):
    """The base class of an optimizer whose matrices are each computed by one rank: see `MatrixMethod`."""

    update_class = MatrixUpdate
