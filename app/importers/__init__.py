"""Files recorded elsewhere, turned into the run format."""


class ImportProblem(ValueError):
    """Files that cannot be imported: what is wrong, where, and what to do, in one line."""
