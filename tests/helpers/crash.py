"""Die at the n-th file operation, as a process does that is killed or loses its machine.

Counted are what changes a disk: open for writing, each write that reaches the system, truncate,
fsync, rename, unlink, mkdir, rmdir. `in_child` forks, so `die_at` never outlives a test.
"""

import builtins
import io
import os
import signal
import traceback
import warnings

COUNTED = ("fsync", "replace", "rename", "unlink", "remove", "mkdir", "rmdir")


class Operations:
    """Replaces Python's file operations, for good. Dies at operation `die_at`, counted from 0.

    `torn`: if that operation is a write, half of it reaches the disk.
    """

    def __init__(self, die_at=None, torn=False):
        self.kinds = []
        self._die_at, self._torn = die_at, torn
        for name in COUNTED:
            setattr(os, name, self._counted(name, getattr(os, name)))
        io.open = builtins.open = self._open(io.open)

    def count(self, kind, before_death=lambda: None):
        if len(self.kinds) == self._die_at:
            if self._torn:
                before_death()
            os.kill(os.getpid(), signal.SIGKILL)
        self.kinds.append(kind)

    def _counted(self, name, original):
        def operation(*args, **kwargs):
            self.count(name)
            return original(*args, **kwargs)

        return operation

    def _open(self, original):
        def opened(file, mode="r", buffering=-1, *args, **kwargs):
            if not set(mode) & set("wax+"):
                return original(file, mode, buffering, *args, **kwargs)
            assert "b" in mode, "text files are not counted"
            self.count("open")
            raw = _CountedFile(file, mode.replace("b", ""))
            raw.operations = self
            if buffering == 0:
                return raw
            return io.BufferedRandom(raw) if "+" in mode else io.BufferedWriter(raw)

        return opened


class _CountedFile(io.FileIO):
    def write(self, data):
        half = memoryview(data).cast("B")[: memoryview(data).nbytes // 2]
        self.operations.count("write", lambda: super(_CountedFile, self).write(half))
        return super().write(data)

    def truncate(self, size=None):
        self.operations.count("truncate")
        return super().truncate(size)


def in_child(function):
    """Run `function` in a fork; returns its exit status, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(start_child(function), 0)[1])


def start_child(function):
    """The process id of a fork that runs `function`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads: the child needs none
        pid = os.fork()
    if pid == 0:
        try:
            function()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid
