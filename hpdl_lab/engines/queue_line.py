"""Placeholder, H-slurm-jobs overwrites it."""


class QueueLine:
    def __enter__(self):
        return self

    def __exit__(self, *exc):
        pass

    def show(self, text):
        print(text)
