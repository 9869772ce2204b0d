"""Functions that `loss_task` calls, for faults to be planted at."""


def in_import():
    pass


def in_model():
    pass


def in_data():
    pass


def in_worker():
    pass


def in_loss():
    pass


def in_backward():
    pass


def in_evaluation():
    pass
