"""The base class of optimizers that update whole matrices."""

from zero.updates.matrix_method import MatrixMethod
from zero.updates.matrix_update import MatrixUpdate


class MatrixOptimizer(MatrixMethod):
    """A method for groups of matrices with its updates over ranks; a class derived from it writes the steps."""

    update_class = MatrixUpdate
